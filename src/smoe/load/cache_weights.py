"""Weights of the multidimensional cache, fitted to a model's recorded traces by `smoe tune --cache`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from smoe.policy.eviction.multidimensional import WEIGHTS
from smoe.policy.registry import are_cache_weights
from smoe.user_cache import keep, of_model, read_stored

_FORMAT = 1


@dataclass(frozen=True)
class FittedWeights:
    """Fitted weights and the conditions of the fit."""

    weights: tuple[float, ...]
    """The weights (lru, lfu, lhu, fld)."""
    resident_share: float
    """The share of the experts in the simulated cache."""
    decode_steps: int
    """The number of decode steps in all traces."""


def cache_weights_of(folder: Path) -> tuple[tuple[float, ...], str]:
    """Return the weights for the model in `folder`, and their origin in words."""
    fitted = _read(of_model("cache", folder))
    if fitted is None:
        return WEIGHTS, "the usual ones; smoe tune --cache fits them on traces of this model"
    return fitted.weights, (
        f"as fitted on {fitted.decode_steps} recorded steps with {fitted.resident_share:.0%} of the experts resident"
    )


def remember(folder: Path, fitted: FittedWeights) -> Path:
    """Store weights in the user's cache, atomically; return the path. Raises `OSError`."""
    return keep(of_model("cache", folder), {"format": _FORMAT} | asdict(fitted))


def _read(path: Path) -> FittedWeights | None:
    """Return the stored weights, or None if the file is missing or of another version."""
    try:
        fitted = FittedWeights(**(read_stored(path, _FORMAT) or {}))
        weights = tuple(fitted.weights)
        return (
            FittedWeights(weights, fitted.resident_share, fitted.decode_steps) if are_cache_weights(weights) else None
        )
    except TypeError:
        return None
