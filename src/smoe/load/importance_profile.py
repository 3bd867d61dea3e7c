"""Stores how a model's choices of experts are distributed by importance. From this distribution follow two thresholds.
Experts of low importance are computed from low-precision copies, and those of the lowest are dropped (HOBBIT, section
3.2).

`smoe tune --shares 67,30,3` measures the distribution on a text, and stores it in the user's cache. The folder of a
model may contain one as well, `smoe-thresholds.json`, as that of the embedded model does. The three percentages are
shares of all choices, resident or not; only missing experts are loaded as low-precision copies or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.load.tuned import TunedValue
from smoe.policy.importance import Thresholds

_PARTS = 200
"""The number of intervals between stored quantiles; each is half a per cent of the choices."""


@dataclass(frozen=True)
class ImportanceProfile(TunedValue):
    """The distribution of unimportance (`policy/importance.py`) over the choices of a text's tokens."""

    kind = "importance"
    file_name = "smoe-thresholds.json"

    quantiles: tuple[float, ...]
    """`_PARTS` + 1 ascending values from 0 to 1: half a per cent of the choices lie between one and the next."""
    tokens: int
    text: str

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> ImportanceProfile:
        quantiles = tuple(map(float, fields.pop("quantiles")))
        is_ascending = list(quantiles) == sorted(quantiles) and quantiles[0] >= 0 and quantiles[-1] <= 1
        if len(quantiles) != _PARTS + 1 or not is_ascending:
            raise ValueError(quantiles)
        return cls(quantiles, **fields)

    @classmethod
    def apply(cls, config: EngineConfig, folder: Path, resident_share: float) -> tuple[EngineConfig, dict[str, str]]:
        (low, skip), origin = thresholds_by(folder, config)
        config = replace(config, low_threshold=low, skip_threshold=skip, precision_shares=None)
        return config, {"low_threshold": f"dropped beyond {skip:g}: {origin}"}

    def thresholds(self, shares: Sequence[float]) -> Thresholds:
        """Return the thresholds T1 and T2 of unimportance (HOBBIT) that divide the choices of experts by `shares`: the
        percentages that use full-precision copies, use low-precision copies, and are dropped. Their sum is 100."""
        own, _, none = shares
        return Thresholds(self._below(own), self._below(100 - none))

    def _below(self, share: float) -> float:
        """Return the unimportance that `share` per cent of the choices do not exceed, interpolated between the stored
        quantiles."""
        if share >= 100:
            return 1.0
        place = share / 100 * _PARTS
        first = int(place)
        low, high = self.quantiles[first : first + 2]
        return round(low + (high - low) * (place - first), 4)

    def __str__(self) -> str:
        return f"{self.tokens} tokens of {self.text}"


def profile_of(values: Sequence[float], tokens: int, text: str) -> ImportanceProfile:
    """Return the importance profile of choices of experts that have the unimportances `values`, at least one, in any
    order."""
    ascending = sorted(values)
    quantiles = [ascending[round(part / _PARTS * (len(ascending) - 1))] for part in range(_PARTS + 1)]
    return ImportanceProfile(tuple(round(value, 5) for value in quantiles), tokens, text)


def thresholds_by(folder: Path, config: EngineConfig) -> tuple[Thresholds, str]:
    """Return the thresholds by which the model in `folder` reaches the percentages `config.precision_shares`, and a
    text that says where the thresholds come from.

    Raises `ConfigError` if the model has no profile and `config` gives no thresholds.
    """
    assert config.precision_shares is not None
    shares = "/".join(f"{share:g}" for share in config.precision_shares)
    own, brought = ImportanceProfile.stored(folder), ImportanceProfile.delivered(folder)
    for profile, whose in ((own, "as you profiled it"), (brought, "by the profile stored with the model")):
        if profile is not None:
            return profile.thresholds(config.precision_shares), f"shares of {shares} {whose}: {profile}"
    typed = ",".join(f"{share:g}" for share in config.precision_shares)
    how = f"smoe tune --shares {typed} profiles it"
    given = Thresholds(config.low_threshold, config.skip_threshold)
    if given == Thresholds():
        raise ConfigError(
            f"`precision_shares={typed}` needs a profile of this model's routing, and there is none: {how}; or give "
            "`low_threshold` and `skip_threshold` (HOBBIT has 0.6 and 0.9 for Mixtral)",
            setting="precision_shares",
            given=typed,
            allowed="only for a model that has a profile",
        )
    return given, f"HOBBIT's own for Mixtral: this model has not been profiled for shares of {shares}; {how}"
