"""What to type where settings need what is not there yet: a pack, prices, a trained predictor, workers, a device."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from typing import NamedTuple

from smoe.cli.cluster import DEFAULT_NAME
from smoe.cli.console import typed_value
from smoe.errors import UnpreparedError
from smoe.policy.registry import EXPERT_MLP
from smoe.presets import PRESETS

TRIED_TOKENS = 100
"""That a predictor is trained on to try it out: half a minute for the embedded model, by default a quarter of an
hour."""
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
    """Two on this machine, and a draft model where the preset has one; they are not started twice."""
    has_draft, has_zmq = shadow_precision is not None, find_spec("zmq") is not None
    up = f"smoe cluster up MODEL --local 2{' --shadow' if has_draft else ''} {_TERMINAL}"
    commands = () if has_zmq and _are_running(has_draft) else (up,)
    install = () if has_zmq else ("pip install 'smoe[cluster]'",)
    options = ("--cluster", DEFAULT_NAME)
    if not has_draft:
        return Preparation((*install, *commands), options)
    pack = f"smoe pack MODEL --precision {shadow_precision}"
    return Preparation((*install, pack, *commands), (*options, "--set", "shadow_on=cluster"))


def _are_running(with_draft: bool) -> bool:
    """Whether the workers of the cluster on this machine run already."""
    from smoe.cluster.identity import clusters, read_main
    from smoe.cluster.running import keeper_process

    if DEFAULT_NAME not in clusters() or keeper_process(DEFAULT_NAME) is None:
        return False
    return bool(read_main(DEFAULT_NAME).shadows) or not with_draft


def _of_preset(setting: str) -> str | None:
    """What the preset that was typed has for a setting."""
    value = PRESETS.get(typed_value(["--preset"]) or "", {}).get(setting)
    return None if value is None else str(value)
