"""Stores and reads the corrections of a model's routers, which `smoe tune --predictor corrected-gates` learns.

For every pair of layers the file has the tensors `LAYER.AFTER.weight`, `.bias` and `.first_bias`. Slope and offset of
each pair's confidence are in the file's header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smoe.errors import UnpreparedError
from smoe.load.learned_file import NotLearnedError, Tensors, keep_learned, learned, path_of
from smoe.models.spec import ModelSpec
from smoe.policy.registry import CORRECTED_GATES
from smoe.prediction.correction import Correction

_FORMAT = 2
_PARTS = ("weight", "bias", "first_bias")


@dataclass(frozen=True)
class LearnedCorrections:
    """Corrections of a model's routers, and the text from which they were learned."""

    corrections: Mapping[tuple[int, int], Correction]
    """The corrections by (layer of the input, layer whose experts are predicted)."""
    tokens: int
    text: str

    def __str__(self) -> str:
        return f"corrections learned on {self.tokens} tokens of {self.text}"


def place_of(folder: Path) -> Path:
    """Return the path of the file with the corrections for the model in `folder`."""
    return path_of(CORRECTED_GATES, folder)


def remember(folder: Path, found: LearnedCorrections) -> Path:
    """Store the corrections of the routers of the model in `folder` in the user's cache, atomically. Return the file's
    path. Raises `OSError`."""
    tensors: dict[str, torch.Tensor] = {}
    confidence: dict[str, list[float]] = {}
    for (layer, after), correction in found.corrections.items():
        pair = f"{layer}.{after}"
        tensors |= {f"{pair}.{name}": getattr(correction, name) for name in _PARTS}
        confidence[pair] = [correction.slope, correction.offset]
    fields = {"tokens": found.tokens, "text": found.text, "confidence": confidence}
    return keep_learned(CORRECTED_GATES, _FORMAT, folder, tensors, fields)


def corrections_of(folder: Path, spec: ModelSpec, depth: int) -> LearnedCorrections:
    """Return the learned corrections of the routers of the model in `folder`, for predictions at most `depth` layers
    ahead.

    Raises `ConfigError` if corrections are missing or incomplete, or were learned for other weights.
    """
    try:
        return _of_pairs(*learned(CORRECTED_GATES, _FORMAT, folder), spec, depth)
    except NotLearnedError as error:
        raise UnpreparedError(
            f"`prefetch={CORRECTED_GATES}`: {error}; run smoe tune on the model with `predictor={CORRECTED_GATES}` "
            "and a `text` of yours, once",
            setting="prefetch",
            given=CORRECTED_GATES,
            allowed="for a model whose corrections have been learned",
        ) from error


def _of_pairs(tensors: Tensors, fields: Mapping[str, Any], spec: ModelSpec, depth: int) -> LearnedCorrections:
    """Return the learned corrections of routers for all pairs of layers up to `depth` apart. Raise `NotLearnedError` if
    a correction is missing or has the wrong shape."""
    experts = {site.layer: site.experts for site in spec.sites}
    hidden, found = int(spec.config.get_text_config().hidden_size), {}
    for layer, after in _pairs(list(experts), depth, fields["confidence"]):
        pair, count = f"{layer}.{after}", experts[after]
        parts = [tensors.get(f"{pair}.{name}", torch.empty(0)) for name in _PARTS]
        fits = [tuple(part.shape) for part in parts] == [(count, 2 * hidden), (count,), (count,)]
        if pair not in fields["confidence"] or not fits or not all(bool(part.isfinite().all()) for part in parts):
            raise NotLearnedError(
                f"the stored corrections that predict layer {after} at layer {layer} are missing or do not fit this "
                "model"
            )
        weight, bias, first_bias = parts
        found[layer, after] = Correction(weight, bias, first_bias, *fields["confidence"][pair])
    return LearnedCorrections(found, fields["tokens"], fields["text"])


def _pairs(layers: list[int], depth: int, confidence: Mapping[str, object]) -> list[tuple[int, int]]:
    """Return the pairs (layer, later layer) that are at most `depth` layers apart, and no further apart than the pairs
    for which corrections were learned."""
    named = [(int(layer), int(after)) for layer, _, after in (name.partition(".") for name in confidence)]
    ahead = [layers.index(after) - layers.index(layer) for layer, after in named if {layer, after} <= set(layers)]
    furthest = min(depth, max(ahead, default=1))
    return [(layer, after) for n, layer in enumerate(layers, start=1) for after in layers[n : n + furthest]]
