"""What was learned of a model, stored in the user's cache: tensors that are believed for that model alone.

    file     safetensors: tensors | metadata "smoe": a JSON object

The object names the format, the checksum of the model's weights and that of the tensors, and holds the fields of
them. Half an answer would be a silent loss, so what is not all there, or of other weights, or of another version, is
refused by what is wrong with it.
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

from smoe.models.weight_samples import checksum
from smoe.user_cache import of_model
from smoe.whole_file import whole_file

_METADATA = "smoe"

Tensors = Mapping[str, torch.Tensor]


class NotLearnedError(Exception):
    """Why there is nothing for these weights; the caller adds what to do."""


def path_of(kind: str, folder: Path) -> Path:
    """The file of something learned of the model in `folder`; `kind` names the sort of thing."""
    path = of_model("learned", folder)
    return path.with_name(f"{path.stem}-{kind}.safetensors")


def keep_learned(kind: str, form: int, folder: Path, tensors: Tensors, fields: Mapping[str, Any]) -> Path:
    """Write tensors and fields about them (JSON), whole or not at all, and the same bytes every time; returns where.

    Raises `OSError`.
    """
    path = path_of(kind, folder)
    header = {"format": form, "checkpoint": checksum(folder), "tensors": _digest(tensors), **fields}
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(save(whole, {_METADATA: json.dumps(header)}))  # one entry: several come in no fixed order
    return path


def learned(kind: str, form: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors, fields about them) as stored for the weights in `folder`; raises `NotLearnedError`."""
    path = path_of(kind, folder)
    try:
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            fields: dict[str, Any] = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError as error:
        raise NotLearnedError(f"no tuned values are stored for the model in {folder}") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise NotLearnedError(f"{path} is truncated, damaged or not readable ({error})") from error
    if fields.get("format") != form:
        raise NotLearnedError(f"{path} has format {fields.get('format')}; this version of smoe reads format {form}")
    if fields.get("checkpoint") != checksum(folder):
        raise NotLearnedError(f"{path} was made for other weights than those in {folder}")
    if fields.get("tensors") != _digest(tensors):
        raise NotLearnedError(f"{path} is damaged: its tensors do not match its header")
    return tensors, fields


def _digest(tensors: Tensors) -> str:
    """SHA-256 of names, shapes, types and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
