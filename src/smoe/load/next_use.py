"""The estimate of the next use that was trained for a model on recorded traces (`smoe tune --eviction learned`)."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smoe.errors import ConfigError
from smoe.policy.eviction.learned import FEATURES, NextUse
from smoe.user_cache import keep, kept, of_model

_FORMAT = 1
_NUMBERS = np.dtype("<f4")


@dataclass(frozen=True)
class TrainedNextUse:
    """An estimate, and what it was trained on."""

    next_use: NextUse
    experts: dict[int, int]
    """Of every layer that has some: another model's estimate says nothing."""
    decode_steps: int
    """Of all traces together."""


def next_use_of(folder: Path, experts: Mapping[int, int]) -> tuple[NextUse, str]:
    """The estimate for the model in `folder`, with so many experts in each layer, and where it comes from.

    Raises `ConfigError` where there is none that this version understands, or it is of other layers or experts.
    """
    trained = _read(of_model("next-use", folder))
    if trained is None:
        raise _unusable("nobody has trained it yet on traces of this model")
    if trained.experts != dict(experts):
        raise _unusable("what was trained is of a model with other layers or experts")
    return trained.next_use, f"as trained on {trained.decode_steps} recorded steps"


def remember(folder: Path, trained: TrainedNextUse) -> Path:
    """Keep an estimate in the user's cache, whole or not at all; returns where. Raises `OSError`."""
    parts = {name: _packed(part) for name, part in _parts(trained.next_use).items()}
    stored = {
        "format": _FORMAT,
        "decode_steps": trained.decode_steps,
        "experts": {str(layer): count for layer, count in trained.experts.items()},
        "rate": trained.next_use.rate,
        "weights": trained.next_use.weights.tolist(),
    }
    return keep(of_model("next-use", folder), stored | parts)


def _unusable(why: str) -> ConfigError:
    return ConfigError(
        f"`eviction` is 'learned', but {why}; run smoe record, then smoe tune with `eviction` learned and the trace as "
        "`cache`, once, or choose `eviction` auto",
        setting="eviction",
        given="learned",
        allowed="for models that it has been trained for",
    )


def _parts(next_use: NextUse) -> dict[str, np.ndarray]:
    """The large ones, by name."""
    return {name: part for name, part in next_use._asdict().items() if name not in ("rate", "weights")}


def _packed(part: np.ndarray) -> dict[str, Any]:
    return {"shape": list(part.shape), "float32": base64.b64encode(part.astype(_NUMBERS).tobytes()).decode("ascii")}


def _unpacked(stored: dict[str, Any]) -> np.ndarray:
    """Raises `ValueError` where numbers are missing or no numbers."""
    numbers = np.frombuffer(base64.b64decode(stored["float32"], validate=True), _NUMBERS).reshape(stored["shape"])
    if not np.isfinite(numbers).all():
        raise ValueError("not finite")
    return numbers.astype(np.float32)


def _read(path: Path) -> TrainedNextUse | None:
    """None where there is no such file, or none that this version understands."""
    stored = kept(path, _FORMAT)
    if stored is None:
        return None
    try:
        parts = {name: _unpacked(stored[name]) for name in ("source", "usual", "target", "offset")}
        next_use = NextUse(float(stored["rate"]), np.array(stored["weights"], dtype=np.float64), **parts)
        experts = {int(layer): int(count) for layer, count in stored["experts"].items()}
        trained = TrainedNextUse(next_use, experts, int(stored["decode_steps"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return trained if _fits(trained) else None


def _fits(trained: TrainedNextUse) -> bool:
    """Whether the parts are of one size, that of the experts."""
    next_use, experts = trained.next_use, trained.experts
    if not experts or next_use.target.ndim != 3 or not 0 < next_use.rate <= 1:
        return False
    layers, width, rank = next_use.target.shape
    return (
        (layers, width) == (max(experts) + 1, max(experts.values()))
        and next_use.source.shape == next_use.target.shape
        and next_use.usual.shape == (layers, rank)
        and next_use.offset.shape == (layers, width)
        and next_use.weights.shape == (FEATURES,)
        and bool(np.isfinite(next_use.weights).all())
    )
