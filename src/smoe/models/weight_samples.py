"""By what a pack knows the checkpoint that it was made of: a checksum of headers and of samples of the weights.

    file     header |s...........|s...........|s........s|      s: a page, at most 16 MiB from one to the next

Names and sizes of the files count too; times and places do not, so a copy is the same checkpoint. Any change to names,
shapes or types is seen, and any that covers 16 MiB in one piece; one between two samples is not. Fine-tuning changes
nearly every number, quantising and casting the headers.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from smoe.memory.gguf_header import part_paths, read_gguf_header
from smoe.memory.safetensors_index import MAX_HEADER_BYTES, shard_paths

SAMPLE_BYTES = 4096
APART_BYTES = 16 * 2**20
"""Bytes from one sample to the next, at most: a disk that has to seek reads those of 60 GB in half a minute."""
_LEAST_SAMPLES = 64
"""The samples of a file so small that samples this far apart would be few."""


def checksum(place: Path) -> str:
    """SHA-256 of the names, sizes, headers and samples of a folder's safetensors, or of the parts of a GGUF file;
    unequal for other weights.

    Raises `CheckpointError` where a file is missing, or is no GGUF file.
    """
    if place.is_dir():
        begins = [(path, _header_end(path)) for path in shard_paths(place)]
    else:
        begins = [(path, read_gguf_header(path).data_offset) for path in part_paths(place)]
    files = [[path.name, path.stat().st_size, _sampled(path, begin)] for path, begin in begins]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _header_end(shard: Path) -> int:
    """Where the header of a safetensors file ends; no more of one whose header is damaged."""
    with shard.open("rb") as file:
        prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    return 8 + int(min(length, MAX_HEADER_BYTES))


def _sampled(path: Path, header_bytes: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        begin = min(size, header_bytes)
        digest.update(file.read(begin))
        for offset in sample_offsets(begin, size):
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def sample_offsets(begin: int, end: int) -> Iterator[int]:
    """Where samples of the bytes from `begin` to `end` begin; the last one ends with them."""
    step = max(SAMPLE_BYTES, min(APART_BYTES, (end - begin) // _LEAST_SAMPLES))
    yield from range(begin, end, step)
    yield max(begin, end - SAMPLE_BYTES)
