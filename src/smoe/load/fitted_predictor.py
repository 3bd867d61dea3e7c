"""Predictors that were fitted on traces of a model (`smoe tune --predictor`), kept in the user's cache.

    file     safetensors: the predictor's tensors | metadata "smoe": a JSON object

The object names the format, the predictor, the model's layers, the checksum of the model's weights and that of the
tensors, so that a predictor of another model, of another version or a damaged one is refused by what it says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from smoe.errors import ConfigError
from smoe.models.weight_samples import checksum
from smoe.prediction.activation_path import RoutedLayer
from smoe.prediction.fitted import Fitted
from smoe.user_cache import of_model
from smoe.whole_file import whole_file

FORMAT = 1
_METADATA = "smoe"


def place_of(place: Path, name: str) -> Path:
    """Where the predictor `name` of the model in `place` is kept."""
    path = of_model("predictors", place)
    return path.with_name(f"{path.stem}-{name}.safetensors")


def remember(place: Path, fitted: Fitted) -> Path:
    """Keep a predictor of the model in `place`, whole or not at all; returns where. Raises `OSError`."""
    path, tensors = place_of(place, fitted.name), dict(fitted.tensors)
    said = {
        "format": FORMAT,
        "predictor": fitted.name,
        "layers": fitted.layers,
        "tokens": fitted.tokens,
        "checkpoint": checksum(place),
        "tensors": _digest(tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(save(tensors, {_METADATA: json.dumps(said)}))  # one entry: several come in no fixed order
    return path


def fitted_of(place: Path, name: str) -> Fitted:
    """The predictor `name` of the model in `place`.

    Raises `ConfigError` where there is none, and for a file that is damaged, of another format or of other weights.
    """
    path = place_of(place, name)
    if not path.exists():
        raise _refused(name, f"it has not been fitted for the model in {place}")
    try:
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            said: dict[str, Any] = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, ValueError) as error:
        raise _refused(name, f"{path} is truncated or damaged ({error})") from error
    if said.get("format") != FORMAT:
        raise _refused(name, f"{path} is of format {said.get('format')}, this smoe reads format {FORMAT}")
    if said["checkpoint"] != checksum(place):
        raise _refused(name, f"{path} was fitted for other weights than those in {place}")
    if said["predictor"] != name or said["tensors"] != _digest(tensors):
        raise _refused(name, f"{path} is damaged: its content is not what its header says")
    return Fitted(name, tuple(RoutedLayer(*layer) for layer in said["layers"]), tensors, said["tokens"])


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, shapes, types and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].numpy()
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"`prefetch` {name}: {why}; run smoe tune on the model with `predictor` {name}, once",
        setting="prefetch",
        given=name,
        allowed="for models that this predictor has been fitted for",
    )
