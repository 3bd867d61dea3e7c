"""How important a model's choices are: the distribution that thresholds are taken from by shares (HOBBIT, section 3.2).

`smoe tune --shares 67,30,3` profiles a text and keeps the distribution in the user's cache. A model's folder may bring
one of its own, `smoe-thresholds.json`, as the embedded model's does. Shares are of all choices, resident or not: only
what is missing comes as a low copy, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.policy.importance import Thresholds
from smoe.user_cache import keep, of_model, read_stored

FILE_NAME = "smoe-thresholds.json"
"""The file's name in a model's folder."""
_FORMAT = 1
_PARTS = 200
"""The distance of the stored quantiles: half a per cent."""


@dataclass(frozen=True)
class ImportanceProfile:
    """The distribution of unimportance (`policy/importance.py`) over a text's choices, token by token."""

    quantiles: tuple[float, ...]
    """The values below which 0, 1, ... `_PARTS` parts of the choices lie, ascending, from 0 to 1."""
    tokens: int
    text: str

    def thresholds(self, shares: Sequence[float]) -> Thresholds:
        """T1 and T2 by which `shares` (per cent: own copies, low copies, none; sum 100) of the choices fall to each."""
        own, _, none = shares
        return Thresholds(self._below(own), self._below(100 - none))

    def _below(self, share: float) -> float:
        """The value that `share` per cent of the choices do not exceed, with straight lines between the quantiles."""
        if share >= 100:
            return 1.0
        place = share / 100 * _PARTS
        first = int(place)
        low, high = self.quantiles[first : first + 2]
        return round(low + (high - low) * (place - first), 4)

    def __str__(self) -> str:
        return f"{self.tokens} tokens of {self.text}"


def profile_of(values: Sequence[float], tokens: int, text: str) -> ImportanceProfile:
    """The profile of choices with these unimportances, at least one, in any order."""
    ascending = sorted(values)
    quantiles = [ascending[round(part / _PARTS * (len(ascending) - 1))] for part in range(_PARTS + 1)]
    return ImportanceProfile(tuple(round(value, 5) for value in quantiles), tokens, text)


def thresholds_by(folder: Path, config: EngineConfig) -> tuple[Thresholds, str]:
    """The thresholds for `config.precision_shares` of the model in `folder`, and where they come from.

    Raises `ConfigError` where the model has no profile and `config` no thresholds in place of it.
    """
    assert config.precision_shares is not None
    shares = "/".join(f"{share:g}" for share in config.precision_shares)
    own, brought = _read(of_model("importance", folder)), _read(folder / FILE_NAME)
    for profile, whose in ((own, "as you profiled it"), (brought, "by the profile stored with the model")):
        if profile is not None:
            return profile.thresholds(config.precision_shares), f"shares of {shares} {whose}: {profile}"
    typed = ",".join(f"{share:g}" for share in config.precision_shares)
    how = f"smoe tune --shares {typed} profiles it"
    given = Thresholds(config.low_threshold, config.skip_threshold)
    if given == Thresholds():
        raise ConfigError(
            f"`precision_shares` {typed} needs a profile of this model's routing, and there is none: {how}; or give "
            "`low_threshold` and `skip_threshold` (HOBBIT has 0.6 and 0.9 for Mixtral)",
            setting="precision_shares",
            given=typed,
            allowed="only for a model that has a profile",
        )
    return given, f"HOBBIT's own for Mixtral: this model has not been profiled for shares of {shares}; {how}"


def remember(folder: Path, profile: ImportanceProfile) -> Path:
    """Keep a profile in the user's cache, whole or not at all; returns where. Raises `OSError`."""
    return keep(of_model("importance", folder), as_json(profile))


def as_json(profile: ImportanceProfile) -> dict[str, Any]:
    """What a file holds."""
    return {"format": _FORMAT} | asdict(profile)


def _read(path: Path) -> ImportanceProfile | None:
    """None where there is no such file, or none that this version understands."""
    try:
        stored = ImportanceProfile(**(read_stored(path, _FORMAT) or {}))
        quantiles = tuple(map(float, stored.quantiles))
    except (TypeError, ValueError):
        return None
    if len(quantiles) != _PARTS + 1 or list(quantiles) != sorted(quantiles) or quantiles[0] < 0 or quantiles[-1] > 1:
        return None
    return ImportanceProfile(quantiles, stored.tokens, stored.text)
