"""Files of learned values in the user's cache. Each is a safetensors file with tensors that are valid for one model
only.

The file's metadata have one entry, "smoe", with a JSON object: the format version, the checksum of the model's weights,
that of the tensors, and further fields. A file that is incomplete, for other weights, or of another version is refused
with the reason, because using only some values would lose quality without a message.
"""

from __future__ import annotations

import hashlib
import json
import re
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
    """Raised if no learned values exist for a model's weights. The text is the reason; the caller adds what the user
    should do."""


def path_of(kind: str, folder: Path) -> Path:
    """Return the path of the file with learned values of the model in `folder`. `kind` names the type of values."""
    path, plain = of_model("learned", folder), re.sub(r"[^\w-]", "_", kind)  # the name of a plug-in contains a path
    return path.with_name(f"{path.stem}-{plain}.safetensors")


def keep_learned(kind: str, form: int, folder: Path, tensors: Tensors, fields: Mapping[str, Any]) -> Path:
    """Write tensors and JSON fields to a file of learned values, atomically and reproducibly. Return the path. Raises
    `OSError`. `form`: the format version."""
    path = path_of(kind, folder)
    header = {"format": form, "checkpoint": checksum(folder), "tensors": _digest(tensors), **fields}
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(save(whole, {_METADATA: json.dumps(header)}))  # one entry, because the order of several is not fixed
    return path


def learned(kind: str, form: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and JSON fields of the learned values for the weights in `folder`. Raise `NotLearnedError` if
    there are none of the format version `form`."""
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
    """Return the SHA-256 of the tensors' names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
