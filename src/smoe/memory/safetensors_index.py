"""Where every tensor of a checkpoint lies, from the headers alone.

A safetensors file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes; `data_offsets` count
from the end of the header. Reading the headers ourselves gives byte ranges, which the library's own reader does not.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100 * 2**20

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2}
ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E8M0": 1}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: its bytes are `path[offset : offset + nbytes]`, row-major."""

    path: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def index_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder` by key.

    Raises `CheckpointError` for missing, truncated or contradictory files.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in shard_paths(folder):
        tensors.update(read_header(path))
    missing = _declared_keys(folder) - tensors.keys()
    if missing:
        raise CheckpointError(
            f"{folder / INDEX_FILE} names {sorted(missing)[0]!r}, which no shard holds; download again"
        )
    return tensors


def shard_paths(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, each of which exists."""
    index = folder / INDEX_FILE
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
    elif (folder / SINGLE_FILE).exists():
        names = [SINGLE_FILE]
    else:
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; smoe reads safetensors checkpoints only"
        )
    paths = [folder / name for name in names]
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise CheckpointError(f"{folder} lacks {len(absent)} of {len(paths)} shards, {absent[0]} first; download again")
    return paths


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is not a safetensors file, or is truncated ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            if not isinstance(header, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            raise CheckpointError(f"{path} has a corrupt header: {error}") from error
    header.pop("__metadata__", None)
    tensors = {key: _stored(path, key, entry, 8 + length) for key, entry in header.items()}
    end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path} is truncated: {size} bytes of {end}; download it again")
    return tensors


def _stored(path: Path, key: str, entry: dict[str, Any], base: int) -> StoredTensor:
    try:
        begin, end = (int(n) for n in entry["data_offsets"])
        shape = tuple(int(n) for n in entry["shape"])
        dtype = str(entry["dtype"])
        nbytes = end - begin
        if not 0 <= begin <= end or any(n < 0 for n in shape):
            raise ValueError("a negative size or offset")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a corrupt entry for {key!r}") from error
    expected = ITEM_BYTES.get(dtype, 0)
    for n in shape:
        expected *= n
    if dtype in ITEM_BYTES and expected != nbytes:
        raise CheckpointError(f"{path}: {key!r} is {dtype}{list(shape)} = {expected} bytes, but {nbytes} are stored")
    return StoredTensor(path, base + begin, nbytes, dtype, shape)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf8"))["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("empty weight_map")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("a shard's name is no text")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is corrupt ({error}); download it again") from error
    return weight_map


def _declared_keys(folder: Path) -> set[str]:
    index = folder / INDEX_FILE
    return set(_weight_map(index)) if index.exists() else set()
