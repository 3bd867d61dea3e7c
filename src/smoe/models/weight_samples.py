"""Identifies a checkpoint by a checksum of its headers and of samples of its weights.

    file     header |s...........|s...........|s........s|      s: one page; at most 16 MiB apart

Names and sizes of files are included, times and folders are not, so a copy has the same checksum. Every change of
names, shapes or types is detected, and every change of 16 contiguous MiB. A change between two samples is not detected.
Fine-tuning changes nearly all weights; quantizing and casting change the headers.
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
"""The largest distance between two samples in bytes. A hard disk reads the samples of 60 GB in half a minute."""
_LEAST_SAMPLES = 64
"""The smallest number of samples, for small files."""


def checksum(place: Path) -> str:
    """Return the SHA-256 of the names, sizes, headers and samples of a folder's safetensors files, or of a GGUF file's
    parts.

    Raise `CheckpointError` if a file is missing or is not a GGUF file.
    """
    if place.is_dir():
        begins = [(path, _header_end(path)) for path in shard_paths(place)]
    else:
        begins = [(path, read_gguf_header(path).data_offset) for path in part_paths(place)]
    files = [[path.name, path.stat().st_size, _sampled(path, begin)] for path, begin in begins]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _header_end(shard: Path) -> int:
    """Return the offset of the end of a safetensors file's header, but at most the largest valid size of a header."""
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
    """Yield the offsets of samples between `begin` and `end`; the last sample ends at `end`."""
    step = max(SAMPLE_BYTES, min(APART_BYTES, (end - begin) // _LEAST_SAMPLES))
    yield from range(begin, end, step)
    yield max(begin, end - SAMPLE_BYTES)
