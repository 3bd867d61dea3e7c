"""The distribution of the importance of a model's choices, from which thresholds follow by shares (HOBBIT, section
3.2).

`smoe tune --shares 67,30,3` profiles a text and stores the distribution in the user's cache. A model's folder may
contain one, `smoe-thresholds.json`, as the embedded model's does. Shares refer to all choices, resident or not; only
missing experts are loaded as low copies or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.tuned import TunedValue
from smoe.policy.importance import Thresholds

_PARTS = 200
"""The number of intervals between stored quantiles: half a per cent each."""


@dataclass(frozen=True)
class ImportanceProfile(TunedValue):
    """The distribution of unimportance (`policy/importance.py`) over the choices of a text's tokens."""

    kind = "importance"
    file_name = "smoe-thresholds.json"

    quantiles: tuple[float, ...]
    """The values below which 0, 1, ... `_PARTS` parts of the choices are, ascending, from 0 to 1."""
    tokens: int
    text: str

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> ImportanceProfile:
        quantiles = tuple(map(float, fields.pop("quantiles")))
        is_ascending = list(quantiles) == sorted(quantiles) and quantiles[0] >= 0 and quantiles[-1] <= 1
        if len(quantiles) != _PARTS + 1 or not is_ascending:
            raise ValueError(quantiles)
        return cls(quantiles, **fields)

    def thresholds(self, shares: Sequence[float]) -> Thresholds:
        """Return the thresholds T1 and T2 for `shares` in per cent: full copies, low copies, dropped; their sum is
        100."""
        own, _, none = shares
        return Thresholds(self._below(own), self._below(100 - none))

    def _below(self, share: float) -> float:
        """Return the value that `share` per cent of the choices do not exceed, interpolated between quantiles."""
        if share >= 100:
            return 1.0
        place = share / 100 * _PARTS
        first = int(place)
        low, high = self.quantiles[first : first + 2]
        return round(low + (high - low) * (place - first), 4)

    def __str__(self) -> str:
        return f"{self.tokens} tokens of {self.text}"


def profile_of(values: Sequence[float], tokens: int, text: str) -> ImportanceProfile:
    """Return the profile of choices with these unimportances (at least one, in any order)."""
    ascending = sorted(values)
    quantiles = [ascending[round(part / _PARTS * (len(ascending) - 1))] for part in range(_PARTS + 1)]
    return ImportanceProfile(tuple(round(value, 5) for value in quantiles), tokens, text)


def thresholds_by(folder: Path, config: EngineConfig) -> tuple[Thresholds, str]:
    """Return the thresholds for `config.precision_shares` of the model in `folder`, and their origin in words.

    Raises `ConfigError` if the model has no profile and `config` has no thresholds.
    """
    assert config.precision_shares is not None
    shares = "/".join(f"{share:g}" for share in config.precision_shares)
    own, brought = ImportanceProfile.measured(folder), ImportanceProfile.delivered(folder)
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
