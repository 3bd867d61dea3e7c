"""How fast the disk gives what the engine reads: of a fresh file, or of a model's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import TypeVar

import torch

from smoe.config import EngineConfig
from smoe.memory.arena import Arena
from smoe.memory.disk import DiskReader
from smoe.memory.store import ExpertStore, Read, page_ceil
from smoe.user_cache import cache_folder

_Item = TypeVar("_Item")
_SMALL_FILE_BYTES = 64 * 2**20


def measure_disk(folder: Path, request_bytes: int, seconds: float, file_bytes: int) -> tuple[float, bool]:
    """(bytes per second, past the page cache?) of reading a fresh file in `folder` as the engine reads experts.

    `request_bytes` at a time, scattered, by as many threads as the engine uses.
    """
    size = page_ceil(min(request_bytes, file_bytes))
    with NamedTemporaryFile(dir=folder, prefix=".smoe-disk-", delete=False) as file:
        path = Path(file.name)
    reader = DiskReader(direct=True)
    try:
        blocks = [Read(path, n * size, size, 0, size) for n in range(_write(path, size, file_bytes))]
        return _rate(reader, _scattered(blocks), seconds), reader.is_direct
    finally:
        reader.close()
        with suppress(FileNotFoundError):
            path.unlink()


def measure_reads(store: ExpertStore, seconds: float) -> float:
    """Bytes per second of reading a model's own experts past the page cache, scattered, by as many threads as the
    engine uses."""
    reader = DiskReader(direct=True)
    try:
        return _rate(reader, [read for key in _scattered(store.keys()) for read in store.reads(*key)], seconds)
    finally:
        reader.close()


def _scattered(items: Sequence[_Item]) -> list[_Item]:
    """By a prime stride: the same order every time."""
    return [items[n * 7919 % len(items)] for n in range(len(items))]


def _rate(reader: DiskReader, reads: Sequence[Read], seconds: float) -> float:
    """Bytes per second of as many of these reads as fit the time."""
    threads = EngineConfig().io_threads
    arena = Arena([(threads, page_ceil(max(read.nbytes for read in reads)))], torch.device("cpu"), huge_pages=True)
    arena.touch()  # as the engine does: into pages that a read, or we, wrote first it is up to half as fast
    arena.wait_touched(None)
    started = perf_counter()

    def read_some(thread: int) -> int:
        done = 0
        for read in reads[thread::threads]:
            done += reader.read(read, arena.buffer(thread))
            if perf_counter() > started + seconds:
                break
        return done

    try:
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(read_some, range(threads)))
        return done / (perf_counter() - started)
    finally:
        arena.close()


def measure_small_disk(request_bytes: int) -> float | None:
    """A short look at the disk of the user's cache folder: 64 MiB; None where nothing can be written there."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return measure_disk(folder, min(request_bytes, _SMALL_FILE_BYTES), 0.3, _SMALL_FILE_BYTES)[0]
    except OSError:
        return None


def _write(path: Path, size: int, file_bytes: int) -> int:
    """Fill a file with blocks that no file system can shrink; returns how many."""
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
