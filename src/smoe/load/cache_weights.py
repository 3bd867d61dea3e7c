"""The weights of the multidimensional cache, which `smoe tune --cache` fits to recorded traces of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smoe.config import EngineConfig
from smoe.load.tuned import TunedValue
from smoe.policy.eviction.multidimensional import WEIGHTS
from smoe.policy.eviction.policies import are_cache_weights


@dataclass(frozen=True)
class FittedWeights(TunedValue):
    """Weights of the multidimensional cache that were fitted to traces, and the conditions of the fit."""

    kind = "cache"

    weights: tuple[float, ...]
    """The four weights, in the order lru, lfu, lhu, fld."""
    resident_share: float
    """The fraction of the experts that fitted into the simulated cache."""
    decode_steps: int
    """The number of decode steps in all traces."""

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> FittedWeights:
        weights = tuple(fields.pop("weights"))
        if not are_cache_weights(weights):
            raise ValueError(weights)
        return cls(weights, **fields)

    @classmethod
    def apply(cls, config: EngineConfig, folder: Path, resident_share: float) -> tuple[EngineConfig, dict[str, str]]:
        weights, origin = cache_weights_of(folder)
        return replace(config, cache_weights=weights), {"cache_weights": origin}


def cache_weights_of(folder: Path) -> tuple[tuple[float, ...], str]:
    """Return the weights of the multidimensional cache for the model in `folder`, and their origin as a text."""
    fitted = FittedWeights.stored(folder)
    if fitted is None:
        return WEIGHTS, "the usual ones; smoe tune --cache fits them on traces of this model"
    return fitted.weights, (
        f"as fitted on {fitted.decode_steps} recorded steps with {fitted.resident_share:.0%} of the experts resident"
    )
