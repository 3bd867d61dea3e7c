"""Finds the GGUF models of a repository by the names of its files. A model is one file or several parts:

NAME-Q4_K_M.gguf
folder/NAME-Q8_0-00001-of-00003.gguf, ...
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from smoe.memory.gguf_header import part_names, part_stem

_QUANTISATION = re.compile(r"(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32)$", re.ASCII | re.IGNORECASE)
_COMPANION = re.compile(r"mmproj|imatrix|^mtp-", re.IGNORECASE)
"""A pattern for files that accompany a model: its image encoder, an importance matrix, multi-token prediction
layers."""


def models_of(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the models that `wanted`, a quantization or a path, may mean. Each model is given by the path of its first
    file."""
    models = _first_parts(names)
    if wanted.lower().endswith(".gguf"):
        return [model for model in models if wanted in (model, *parts_of(model))]
    ending = re.compile(rf"(?:^|[-._]){re.escape(wanted)}$", re.IGNORECASE)
    found = [model for model in models if ending.search(_stem(model))]
    exact = [model for model in found if _quantisation(model).lower() == wanted.lower()]
    return exact or found


def is_companion(name: str) -> bool:
    """Return whether a file of this name only accompanies a model, for example as its image encoder."""
    return _COMPANION.search(name) is not None


def parts_of(model: str) -> list[str]:
    """Return the paths of all files of a split model in order, given the path of one of them."""
    path = PurePosixPath(model)
    return [str(path.with_name(name)) for name in part_names(path.name)]


def labels_of(names: Iterable[str]) -> list[str]:
    """Return the names by which users can select models: the quantization if it is unique, otherwise the path."""
    models = _first_parts(names)
    labels = [_quantisation(model) for model in models]
    return sorted(
        label if label and labels.count(label) == 1 else model for model, label in zip(models, labels, strict=True)
    )


def _first_parts(names: Iterable[str]) -> list[str]:
    """Return the path of the first file of every GGUF model, as far as the file exists."""
    first: dict[str, str] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() == ".gguf" and not is_companion(path.name):
            first.setdefault(str(path.with_name(part_stem(path.name))), name)
    return sorted(first.values())


def _stem(model: str) -> str:
    """Return a model's file name without the number of the file and the extension."""
    return re.sub(r"\.gguf$", "", part_stem(PurePosixPath(model).name), flags=re.IGNORECASE)


def _quantisation(model: str) -> str:
    """Return the quantization at the end of a model's name, or an empty string."""
    match = _QUANTISATION.search(_stem(model))
    return match[0] if match else ""
