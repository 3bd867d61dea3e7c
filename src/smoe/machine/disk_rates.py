"""Measures the disk's rate for reads like the engine's, on a new file or on the files of a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import TypeVar

from smoe.config import EngineConfig
from smoe.machine.processor import reading_threads
from smoe.memory.arena import Arena
from smoe.memory.expert_files import DiskReader
from smoe.memory.store import ExpertStore, Read, page_ceil
from smoe.user_cache import cache_folder

_Item = TypeVar("_Item")
_SMALL_FILE_BYTES = 64 * 2**20
_LEAST_BUFFERS_BYTES = 64 * 2**20
"""The least memory for buffers, in bytes. A few buffers of small experts would mostly be in small pages, because huge
pages have 2 MiB."""

_MOST_RATE = 16 * 10**9
"""A rate that no disk exceeds, in bytes per second. It limits how many reads are listed for a measurement."""


def measure_disk(folder: Path, request_bytes: int, seconds: float, file_bytes: int) -> tuple[float, bool]:
    """Return the rate of reading a new file in `folder` as the engine reads experts, in bytes per second, and whether
    the reads bypassed the page cache.

    The reads have `request_bytes`, are scattered over the file, and run on as many threads as the engine uses.
    """
    size = page_ceil(min(request_bytes, file_bytes))
    with NamedTemporaryFile(dir=folder, prefix=".smoe-disk-", delete=False) as file:
        path = Path(file.name)
    reader = DiskReader(direct=True)
    try:
        blocks = [Read(path, n * size, size, 0, size) for n in range(_write(path, size, file_bytes))]
        with _buffers(size) as buffers:
            return _rate(reader, _scattered(blocks), seconds, buffers)[0], reader.is_direct
    finally:
        reader.close()
        with suppress(FileNotFoundError):
            path.unlink()


def measure_reads(store: ExpertStore, seconds: float) -> float:
    """Return the rate of scattered reads of a model's own experts past the page cache, in bytes per second.

    The second of two passes is measured. The data that decode steps read have usually been read before, so the disk may
    have them in a cache of its own. For a virtual disk, this cache is the memory of another machine, which doubles the
    rate (docs/log/disk.md).
    """
    reader = DiskReader(direct=True)
    reads = _scattered_reads(store, int(_MOST_RATE * seconds / 2))
    try:
        with _buffers(max(read.nbytes for read in reads)) as buffers:
            _, known = _rate(reader, reads, seconds / 2, buffers)
            return _rate(reader, reads[:known], seconds / 2, buffers)[0]
    finally:
        reader.close()


def _scattered_reads(store: ExpertStore, most_bytes: int) -> list[Read]:
    """Return the reads of experts in a scattered order: of all experts, or of so many that they exceed `most_bytes`."""
    reads: list[Read] = []
    left = most_bytes
    for key in _scattered(store.keys()):
        if left < 0:
            break
        of_expert = store.reads(*key)
        reads += of_expert
        left -= sum(read.nbytes for read in of_expert)
    return reads


def _scattered(items: Sequence[_Item]) -> list[_Item]:
    """Return the items in a scattered order, which is always the same for the same number of items."""
    return [items[n * 7919 % len(items)] for n in range(len(items))]


@contextmanager
def _buffers(nbytes: int) -> Iterator[list[list[memoryview]]]:
    """Yield the buffers of every reading thread, each for a read of `nbytes`."""
    threads, size = reading_threads(EngineConfig()), page_ceil(nbytes)
    each = -(-_LEAST_BUFFERS_BYTES // (threads * size))
    arena = Arena([(threads * each, size)], huge_pages=True)
    # touched as by the engine: reads into untouched pages, or pages this process wrote, take up to twice as long
    arena.touch()
    arena.wait_touched(None)
    try:
        yield [[arena.buffer(n) for n in range(first, first + each)] for first in range(0, threads * each, each)]
    finally:
        arena.close()


def _rate(
    reader: DiskReader, reads: Sequence[Read], seconds: float, buffers: Sequence[Sequence[memoryview]]
) -> tuple[float, int]:
    """Return the rate of as many reads as fit into `seconds`, in bytes per second, and a number n: the first n reads
    were certainly among them. `buffers`: those of every reading thread."""
    threads, started = len(buffers), perf_counter()

    def read_some(thread: int) -> tuple[int, int]:
        came = done = 0
        for read, buffer in zip(reads[thread::threads], cycle(buffers[thread]), strict=False):
            came += reader.read(read, buffer)
            done += 1
            if perf_counter() > started + seconds:
                break
        return came, done

    with ThreadPoolExecutor(threads) as pool:
        came, done = zip(*pool.map(read_some, range(threads)), strict=True)
    return sum(came) / (perf_counter() - started), min(len(reads), threads * max(1, min(done)))


def measure_small_disk(request_bytes: int) -> float | None:
    """Return the rate of the disk with the user's cache folder, in bytes per second, from a short measurement with 64
    MiB. None if the folder is not writable."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return measure_disk(folder, min(request_bytes, _SMALL_FILE_BYTES), 0.3, _SMALL_FILE_BYTES)[0]
    except OSError:
        return None


def _write(path: Path, size: int, file_bytes: int) -> int:
    """Fill a file with blocks that cannot be compressed. Return the number of blocks."""
    count = max(1, file_bytes // size)
    block = os.urandom(size)
    with path.open("wb") as file:
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return count
