"""Stores and reads the corrections of a model's routers, which `smoe tune --predictor corrected-gates` learns.

For every pair of layers the file has the tensors `LAYER.AFTER.weight`, `.bias` and `.first_bias`. Slope and offset of
each pair's confidence are in the file's header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from smoe.load.learned_file import LearnedValue, ModelShape, NotLearnedError, Tensors
from smoe.policy.registry import CORRECTED_GATES
from smoe.prediction.correction import Correction

_PARTS = ("weight", "bias", "first_bias")


@dataclass(frozen=True)
class LearnedCorrections(LearnedValue):
    """Corrections of a model's routers, and the text from which they were learned."""

    name = CORRECTED_GATES
    how = "smoe tune on the model with `predictor={name}` and a `text` of yours"

    corrections: Mapping[tuple[int, int], Correction]
    """The corrections by (layer of the input, layer whose experts are predicted)."""
    tokens: int
    text: str

    @property
    def origin(self) -> str:
        return f"corrections learned on {self.tokens} tokens of {self.text}"

    def contents(self) -> tuple[Tensors, dict[str, Any]]:
        tensors: dict[str, torch.Tensor] = {}
        confidence: dict[str, list[float]] = {}
        for (layer, after), correction in self.corrections.items():
            pair = f"{layer}.{after}"
            tensors |= {f"{pair}.{name}": getattr(correction, name) for name in _PARTS}
            confidence[pair] = [correction.slope, correction.offset]
        return tensors, {"tokens": self.tokens, "text": self.text, "confidence": confidence}

    @classmethod
    def of_contents(cls, name: str, tensors: Tensors, fields: dict[str, Any], model: ModelShape) -> LearnedCorrections:
        """Return the corrections for all pairs of layers up to `model.depth` apart."""
        found = {}
        for layer, after in _pairs(list(model.experts), model.depth, fields["confidence"]):
            pair, count = f"{layer}.{after}", model.experts[after]
            parts = [tensors.get(f"{pair}.{part}", torch.empty(0)) for part in _PARTS]
            fits = [tuple(part.shape) for part in parts] == [(count, 2 * model.hidden_size), (count,), (count,)]
            if pair not in fields["confidence"] or not fits or not all(bool(part.isfinite().all()) for part in parts):
                raise NotLearnedError(
                    f"the stored corrections that predict layer {after} at layer {layer} are missing or do not fit "
                    "this model"
                )
            weight, bias, first_bias = parts
            found[layer, after] = Correction(weight, bias, first_bias, *fields["confidence"][pair])
        return cls(found, fields["tokens"], fields["text"])


def _pairs(layers: list[int], depth: int, confidence: Mapping[str, object]) -> list[tuple[int, int]]:
    """Return the pairs (layer, later layer) that are at most `depth` layers apart, and no further apart than the pairs
    for which corrections were learned."""
    named = [(int(layer), int(after)) for layer, _, after in (name.partition(".") for name in confidence)]
    ahead = [layers.index(after) - layers.index(layer) for layer, after in named if {layer, after} <= set(layers)]
    furthest = min(depth, max(ahead, default=1))
    return [(layer, after) for n, layer in enumerate(layers, start=1) for after in layers[n : n + furthest]]
