"""Finds the commands to type first if settings need something that does not exist yet: a pack, measured quality costs,
a trained predictor, workers, or a device."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from typing import NamedTuple

from smoe.cli.cluster import DEFAULT_NAME
from smoe.cli.typed_value import typed_value
from smoe.errors import UnpreparedError
from smoe.load.check_zmq import INSTALL
from smoe.policy.registry import predictor_kind
from smoe.presets import PRESETS

TRIED_TOKENS = 100
"""The number of tokens on which the printed command trains a predictor. Training then takes half a minute for the demo,
instead of a quarter of an hour."""
_TERMINAL = "  # in another terminal, until Ctrl-C"


class Preparation(NamedTuple):
    """The commands to type before a refused command can work, with `MODEL` as a placeholder, and the options to add to
    the refused command."""

    commands: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def commands_for(error: UnpreparedError) -> list[str]:
    """Return the commands that the user should type, in order; the last one is the refused command itself. Empty if the
    error is not about a model."""
    if error.model is None:
        return []
    found = _preparation(error)
    again = shlex.join(["smoe", *sys.argv[1:], *found.options])
    return [*(line.replace("MODEL", shlex.quote(error.model)) for line in found.commands), again]


def _preparation(error: UnpreparedError) -> Preparation:
    if error.setting == "balance":
        return Preparation(options=("--device", "emulated", "--profile", "rtx-4060-ti"))
    if error.setting == "placement":
        return _workers(_of_preset("draft_precision"))
    if error.setting in ("precision", "low_precision", "draft_precision"):
        return Preparation((f"smoe pack MODEL --precision {error.given}",))
    if error.setting in ("max_perplexity_increase", "tpot_seconds"):
        low = typed_value(["--low-precision"]) or _of_preset("low_precision")
        return Preparation((f"smoe tune MODEL --prices{'' if low is None else f' --low-precision {low}'}",))
    tokens = f" --tokens {TRIED_TOKENS}" if predictor_kind(str(error.given)).trained_by else ""
    return Preparation((f"smoe tune MODEL --predictor {error.given}{tokens}",))


def _workers(draft_precision: str | None) -> Preparation:
    """Return the commands that start two workers on this machine, and a draft model if `draft_precision` is given, and
    the options to add to the refused command. Commands for workers that already run are left out."""
    has_draft, has_zmq = draft_precision is not None, find_spec("zmq") is not None
    up = f"smoe cluster up MODEL --local 2{' --draft' if has_draft else ''} {_TERMINAL}"
    commands = () if has_zmq and _are_running(has_draft) else (up,)
    install = () if has_zmq else (f"{INSTALL}    # in the copy of the repository",)
    options = ("--cluster", DEFAULT_NAME)
    if not has_draft:
        return Preparation((*install, *commands), options)
    pack = f"smoe pack MODEL --precision {draft_precision}"
    return Preparation((*install, pack, *commands), (*options, "--set", "draft_on=cluster"))


def _are_running(with_draft: bool) -> bool:
    """Return whether workers of the default cluster already run on this machine."""
    from smoe.cluster.running import keeper_process
    from smoe.cluster.stored_identity import clusters, read_coordinator

    if DEFAULT_NAME not in clusters() or keeper_process(DEFAULT_NAME) is None:
        return False
    return bool(read_coordinator(DEFAULT_NAME).drafts) or not with_draft


def _of_preset(setting: str) -> str | None:
    """Return the value of a setting in the preset that the user typed; None if no preset was typed or it has no such
    value."""
    value = PRESETS.get(typed_value(["--preset"]) or "", {}).get(setting)
    return None if value is None else str(value)
