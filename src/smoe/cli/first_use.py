"""What to type where settings need what is not there yet: a pack, prices, a trained predictor, workers, a device."""

from __future__ import annotations

import shlex
import sys
from typing import NamedTuple

from smoe.cli.cluster import DEFAULT_NAME
from smoe.cli.console import typed_value
from smoe.errors import UnpreparedError
from smoe.policy.registry import EXPERT_MLP
from smoe.presets import PRESETS

TRIED_TOKENS = 300
"""That a predictor is trained on to try it out: a minute for the embedded model, by default a quarter of an hour."""
_TERMINAL = "  # in another terminal, until Ctrl-C"


class Preparation(NamedTuple):
    """Commands with `MODEL` in the place of the model, and options for the command that was refused."""

    commands: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def commands_for(error: UnpreparedError) -> list[str]:
    """Lines to type one after the other, the last of them the command that was refused; none where the error is of no
    command with a model."""
    if error.model is None:
        return []
    found = _preparation(error)
    again = shlex.join(["smoe", *sys.argv[1:], *found.options])
    return [*(line.replace("MODEL", shlex.quote(error.model)) for line in found.commands), again]


def _preparation(error: UnpreparedError) -> Preparation:
    if error.setting == "balance":
        return Preparation(options=("--device", "emulated", "--profile", "rtx-4060-ti"))
    if error.setting == "placement":
        return _workers(_of_preset("shadow_precision"))
    if error.setting in ("precision", "low_precision", "shadow_precision"):
        return Preparation((f"smoe pack MODEL --precision {error.given}",))
    if error.setting in ("max_perplexity_increase", "tpot_seconds"):
        low = typed_value(["--low-precision"]) or _of_preset("low_precision")
        return Preparation((f"smoe tune MODEL --prices{'' if low is None else f' --low-precision {low}'}",))
    tokens = f" --tokens {TRIED_TOKENS}" if error.given == EXPERT_MLP else ""
    return Preparation((f"smoe tune MODEL --predictor {error.given}{tokens}",))


def _workers(shadow_precision: str | None) -> Preparation:
    """Two on this machine, and a shadow where the preset has one."""
    up = "smoe cluster up MODEL --local 2"
    options = ("--cluster", DEFAULT_NAME)
    if shadow_precision is None:
        return Preparation((f"{up} {_TERMINAL}",), options)
    pack = f"smoe pack MODEL --precision {shadow_precision}"
    return Preparation((pack, f"{up} --shadow {_TERMINAL}"), (*options, "--set", "shadow_on=cluster"))


def _of_preset(setting: str) -> str | None:
    """What the preset that was typed has for a setting."""
    value = PRESETS.get(typed_value(["--preset"]) or "", {}).get(setting)
    return None if value is None else str(value)
