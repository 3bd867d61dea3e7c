"""Which prefetch and which eviction won a model's tournament on this machine, in the user's cache.

`smoe tune --prefetch auto` and `--eviction auto` hold one (`eval/tournament.py`) and keep the winner; from then on
`auto` is the winner where this machine serves that model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smoe.config import EngineConfig
from smoe.machine.measure import describe_machine
from smoe.policy.registry import ONLINE_EVICTION, PREFETCH
from smoe.user_cache import keep, kept, of_model

_FORMAT = 1
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
    processor: str

    def __str__(self) -> str:
        return (
            f"won the tournament on {self.text} with {self.resident_share:.0%} of the experts resident, "
            f"{1e3 * self.seconds:.1f} ms a token ({self.second} {1e3 * self.second_seconds:.1f})"
        )


def winners_of(folder: Path) -> dict[str, Winner]:
    """By setting, those of this machine's tournaments of the model in `folder`."""
    stored = kept(of_model("winners", folder), _FORMAT) or {}
    found = {}
    for setting, choices in CHOICES.items():
        try:
            winner = Winner(**stored[setting])
        except (KeyError, TypeError):
            continue
        if winner.name in choices and winner.processor == _processor():
            found[setting] = winner
    return found


def remember(folder: Path, setting: str, winner: Winner) -> Path:
    """Keep a winner beside those of the other settings; returns where. Raises `OSError`."""
    path = of_model("winners", folder)
    stored: dict[str, Any] = kept(path, _FORMAT) or {}
    return keep(path, {"format": _FORMAT} | stored | {setting: vars(winner)})


def winner(name: str, seconds: float, second: str, second_seconds: float, resident_share: float, text: str) -> Winner:
    """Of a tournament on this machine."""
    return Winner(name, seconds, second, second_seconds, resident_share, text, _processor())


def with_winners(config: EngineConfig, folder: Path) -> tuple[EngineConfig, dict[str, str]]:
    """The configuration with every `auto` that a tournament has decided, and why, by setting.

    A prefetch that won is still on trial where it runs: what does not pay there is off by itself.
    """
    reasons: dict[str, str] = {}
    for setting, found in winners_of(folder).items():
        if getattr(config, setting) != "auto" or found.name == "auto":
            continue
        if setting == "prefetch" and config.prefetch_trial is None:
            config = replace(config, prefetch_trial=True)
        changed: dict[str, Any] = {setting: found.name}
        config = replace(config, **changed)
        reasons[setting] = str(found)
    return config, reasons


def _processor() -> str:
    return str(describe_machine()["processor"])
