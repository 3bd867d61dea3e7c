"""Corrections of a model's routers, learned by `smoe tune --predictor corrected-gates`: kept, found again, believed.

One safetensors file in the user's cache for each model: `LAYER.AFTER.weight`, `.bias` and `.first_bias` for every pair
of layers, and in the header's metadata `format`, `checkpoint` (whose they are), `tokens`, `text` and `confidence`
(slope and offset of each pair). Half an answer would be a silent loss, so what is not all there is refused, with what
to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from smoe.bounds import CORRECTED_GATES
from smoe.errors import ConfigError
from smoe.models.spec import ModelSpec
from smoe.models.weight_samples import checksum
from smoe.prediction.correction import Correction
from smoe.user_cache import of_model
from smoe.whole_file import whole_file

_FORMAT = "1"
_TRAIN = f"run smoe tune on it with `predictor` {CORRECTED_GATES} and some of your `text`"


@dataclass(frozen=True)
class LearnedCorrections:
    """Corrections, and what they were learned on."""

    corrections: Mapping[tuple[int, int], Correction]
    """By the layer asked at and the layer asked for."""
    tokens: int
    text: str

    def __str__(self) -> str:
        return f"corrections learned on {self.tokens} tokens of {self.text}"


def place_of(folder: Path) -> Path:
    """The file for the model in `folder`."""
    return of_model(CORRECTED_GATES, folder).with_suffix(".safetensors")


def remember(folder: Path, learned: LearnedCorrections) -> Path:
    """Keep corrections in the user's cache, whole or not at all; returns where. Raises `OSError`."""
    tensors: dict[str, torch.Tensor] = {}
    confidence: dict[str, list[float]] = {}
    for (layer, after), correction in learned.corrections.items():
        pair = f"{layer}.{after}"
        tensors |= {f"{pair}.{name}": getattr(correction, name) for name in ("weight", "bias", "first_bias")}
        confidence[pair] = [correction.slope, correction.offset]
    metadata = {
        "format": _FORMAT,
        "checkpoint": checksum(folder),
        "tokens": str(learned.tokens),
        "text": learned.text,
        "confidence": json.dumps(confidence),
    }
    path = place_of(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(save(tensors, metadata))
    return path


def corrections_of(folder: Path, spec: ModelSpec, depth: int) -> LearnedCorrections:
    """What was learned for the model in `folder`, for at most `depth` layers ahead.

    Raises `ConfigError` where nothing was, or not for these weights, or not all of it can be read.
    """
    path = place_of(folder)
    if not path.exists():
        raise _refused(f"nothing has been learned yet for this model: {_TRAIN}, once")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            form = metadata.get("format", "none")
            if form != _FORMAT:
                raise _refused(f"{path} is of format {form}, this version reads {_FORMAT}: {_TRAIN} again")
            if metadata["checkpoint"] != checksum(folder):
                raise _refused(f"{path} was learned with other weights than this model's: {_TRAIN} again")
            confidence = json.loads(metadata["confidence"])
            found = {}
            for layer, after in _pairs(spec, depth, confidence):
                pair = f"{layer}.{after}"
                parts = [file.get_tensor(f"{pair}.{name}") for name in ("weight", "bias", "first_bias")]
                found[layer, after] = Correction(*parts, *confidence[pair])
            learned = LearnedCorrections(found, int(metadata["tokens"]), metadata["text"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise _refused(f"{path} is damaged ({error}): {_TRAIN} again") from error
    _check_shapes(learned, spec, path)
    return learned


def _pairs(spec: ModelSpec, depth: int, confidence: Mapping[str, object]) -> list[tuple[int, int]]:
    """The pairs of this model's layers within `depth`, as far ahead as was learned at all."""
    layers = [site.layer for site in spec.sites]
    learned = min(
        depth, max((layers.index(after) - layers.index(layer) for layer, after in _named(confidence)), default=1)
    )
    return [(layer, after) for n, layer in enumerate(layers, start=1) for after in layers[n : n + learned]]


def _named(confidence: Mapping[str, object]) -> list[tuple[int, int]]:
    """Pairs by their names."""
    return [(int(layer), int(after)) for layer, _, after in (name.partition(".") for name in confidence)]


def _check_shapes(learned: LearnedCorrections, spec: ModelSpec, path: Path) -> None:
    hidden = int(spec.config.get_text_config().hidden_size)
    experts = {site.layer: site.experts for site in spec.sites}
    for (_, after), (weight, bias, first_bias, _, _) in learned.corrections.items():
        count = experts[after]
        shapes = [tuple(value.shape) for value in (weight, bias, first_bias)]
        is_finite = all(bool(torch.isfinite(value).all()) for value in (weight, bias, first_bias))
        if shapes != [(count, 2 * hidden), (count,), (count,)] or not is_finite:
            raise _refused(f"{path} does not fit layer {after} of this model: {_TRAIN} again")


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"`prefetch` {CORRECTED_GATES}: {why}",
        setting="prefetch",
        given=CORRECTED_GATES,
        allowed="for a model whose corrections have been learned",
    )
