"""Locates every tensor of a GGUF model, in one file or in the parts of a split model.

A tensor's `dtype` is ggml's name of its type ("F32", "BF16", "Q4_K", "MXFP4"). Its `shape` is row-major, which reverses
ggml's dimensions, so that experts are [E, N, K]. A row consists of whole blocks, so one expert of a tensor is a
contiguous range of bytes also in quantized types.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from smoe.errors import CheckpointError
from smoe.formats.added import added_format
from smoe.memory.dtypes import STORED
from smoe.memory.gguf_header import GgufHeader, TensorEntry, part_paths, read_gguf_header
from smoe.memory.safetensors_index import StoredTensor

BLOCKS = {kind.name: GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES}
"""(elements, bytes) of a block of every type, by ggml's name. An unquantized number is a block of one element."""
INTEGERS = ("I32",)
"""Types of tensors that are not weights, such as tables with the experts of each token id."""
_NAMES = {int(kind): kind.name for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES}


@cache
def is_readable(dtype: str) -> bool:
    """Return whether tensors of a ggml type can be read. Readable are unquantized types, types that the gguf package
    can dequantize, and types of plug-ins."""
    if dtype in STORED or dtype in INTEGERS or dtype not in GGMLQuantizationType.__members__:
        return True
    try:
        dequantize(np.zeros((1, BLOCKS[dtype][1]), np.uint8), GGMLQuantizationType[dtype])
    except NotImplementedError:
        return False
    return True


def read_headers(path: Path) -> list[GgufHeader]:
    """Return the headers of all files of a model. The first of them contains the metadata.

    Raises `CheckpointError` if a file is missing or belongs to another model.
    """
    headers = [read_gguf_header(part) for part in part_paths(path)]
    for number, header in enumerate(headers):
        stated = (header.metadata.get("split.no", 0), header.metadata.get("split.count", 0) or 1)
        if stated != (number, len(headers)):
            raise CheckpointError(
                f"{header.path} contains part {stated[0]} (counted from 0) of {stated[1]} of the model, but its name "
                f"says part {number} of {len(headers)}; name the parts NAME-00001-of-00003.gguf and so on, as they "
                "were published"
            )
    expected = headers[0].metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if len(headers) > 1 and expected not in (None, found):
        raise CheckpointError(
            f"{headers[0].path} says that all parts of the model hold {expected} tensors together, and they hold "
            f"{found}; download all parts again"
        )
    return headers


def index_gguf(headers: list[GgufHeader]) -> dict[str, StoredTensor]:
    """Return every tensor of a GGUF model by its name. Raise `CheckpointError`, with file and tensor, if a file's table
    of tensors is inconsistent."""
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for tensor in _tensors(header):
            if tensor.key in tensors:
                raise CheckpointError(f"{header.path} holds the tensor {tensor.key!r} a second time; download it again")
            tensors[tensor.key] = tensor
    return tensors


def _tensors(header: GgufHeader) -> Iterator[StoredTensor]:
    """Yield the tensors of one GGUF file. Raise `CheckpointError` unless each begins at the next aligned offset after
    the previous tensor."""
    path, size = header.path, header.identity.nbytes
    end, before = header.data_offset, "the header"
    for entry in header.tensors:
        shape, name = tuple(reversed(entry.dimensions)), _type_name(path, entry)
        nbytes = _nbytes(path, entry, name)
        offset = header.data_offset + entry.offset
        expected = -(-end // header.alignment) * header.alignment
        if offset != expected:
            kind = "overlaps" if offset < end else "does not follow"
            raise CheckpointError(f"{path} is damaged: the tensor {entry.name!r} {kind} {before}; download it again")
        end, before = offset + nbytes, repr(entry.name)
        if end > size:
            raise CheckpointError(
                f"{path} is cut short: it has {size} bytes, and the tensor {entry.name!r} ends at byte {end}; "
                "download it again"
            )
        yield StoredTensor(path, offset, nbytes, name, shape, entry.name, header.identity)


def _type_name(path: Path, entry: TensorEntry) -> str:
    if entry.kind not in _NAMES:
        added = added_format(entry.kind)
        if added is not None:
            BLOCKS[added.name] = added.numbers, added.nbytes
            return added.name
        raise CheckpointError(
            f"{path}: the tensor {entry.name!r} is of ggml's type number {entry.kind}, which is unknown: the file is "
            "damaged, or newer than the installed gguf package (pip install -U gguf), or needs a plug-in"
        )
    return _NAMES[entry.kind]


def _nbytes(path: Path, entry: TensorEntry, dtype: str) -> int:
    elements, nbytes = BLOCKS[dtype]
    if entry.dimensions[0] % elements:
        raise CheckpointError(
            f"{path} is damaged: the tensor {entry.name!r} has rows of {entry.dimensions[0]} elements, and {dtype} "
            f"comes in blocks of {elements}; download it again"
        )
    return prod(entry.dimensions) // elements * nbytes
