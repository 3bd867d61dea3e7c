"""Which prefetch and which eviction won a model's tournament on this machine, in the user's cache.

`smoe tune --prefetch auto` and `--eviction auto` hold one (`eval/tournament.py`) and keep the winner; from then on
`auto` is the winner where this machine serves that model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from smoe.bounds import EMULATED
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.learned import Learned, learned_of
from smoe.machine.measure import describe_machine
from smoe.memory.emulation import read_profile
from smoe.models.spec import ModelSpec
from smoe.policy.registry import ONLINE_EVICTION, PREFETCH
from smoe.user_cache import keep, kept, of_model

_FORMAT = 2
_log = logging.getLogger(__name__)

CHOICES = {"prefetch": PREFETCH, "eviction": tuple(ONLINE_EVICTION)}
"""The settings that have tournaments, and who may win."""


@dataclass(frozen=True)
class Winner:
    """Who won, against whom, where."""

    name: str
    seconds: float
    """A token."""
    second: str
    second_seconds: float
    resident_share: float
    text: str
    machine: str
    """As `where` tells it."""

    def __str__(self) -> str:
        return (
            f"won the tournament on {self.text} with {self.resident_share:.0%} of the experts resident, "
            f"{1e3 * self.seconds:.1f} ms a token ({self.second} {1e3 * self.second_seconds:.1f})"
        )


def winners_of(folder: Path, machine: str) -> dict[str, Winner]:
    """By setting, those of the tournaments of the model in `folder` on such a machine."""
    stored = kept(of_model("winners", folder), _FORMAT) or {}
    found = {}
    for setting, choices in CHOICES.items():
        try:
            winner = Winner(**stored[setting])
        except (KeyError, TypeError):
            continue
        if winner.name in choices and winner.machine == machine:
            found[setting] = winner
    return found


def remember(folder: Path, setting: str, winner: Winner) -> Path:
    """Keep a winner beside those of the other settings; returns where. Raises `OSError`."""
    path = of_model("winners", folder)
    stored: dict[str, Any] = kept(path, _FORMAT) or {}
    return keep(path, {"format": _FORMAT} | stored | {setting: vars(winner)})


class Decided(NamedTuple):
    """A configuration in which tournaments have decided, and what it needs."""

    config: EngineConfig
    learned: Learned
    reasons: dict[str, str]
    """Why, by setting."""


def with_winners(config: EngineConfig, place: Path, spec: ModelSpec, device: torch.device) -> Decided:
    """The configuration with every `auto` that a tournament has decided; `place` holds the model.

    A prefetch that won is still on trial where it runs: what does not pay there is off by itself. A winner whose
    learned file is gone, or belongs to other weights, decides nothing. Raises `ConfigError` where what the user asks
    for by name has not been learned.
    """
    decided = Decided(config, *learned_of(config, place, spec))
    for setting, found in winners_of(place, where(config, device)).items():
        if getattr(config, setting) != "auto" or found.name == "auto":
            continue
        changed: dict[str, Any] = {setting: found.name}
        if setting == "prefetch" and config.prefetch_trial is None:
            changed["prefetch_trial"] = True
        with_it = replace(decided.config, **changed)
        try:
            learned, reasons = learned_of(with_it, place, spec)
        except ConfigError as error:
            _log.warning("`%s` auto: %s won the tournament, but is not used: %s", setting, found.name, error)
            continue
        because = f"{found}; {reasons[setting]}" if setting in reasons else str(found)
        decided = Decided(with_it, learned, decided.reasons | reasons | {setting: because})
    return decided


def where(config: EngineConfig, device: torch.device) -> str:
    """What a tournament's times hold for: the processor, and the device beside it or the profile that it acts."""
    processor = str(describe_machine()["processor"])
    if config.device == EMULATED:
        return f"{processor}, acting {read_profile(config.profile).name}"
    return processor if device.type == "cpu" else f"{processor}, {torch.cuda.get_device_name(device)}"
