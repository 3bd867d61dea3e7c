"""How fast the disk gives what the engine reads: of a fresh file, or of a model's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import perf_counter

import torch

from smoe.config import EngineConfig
from smoe.memory.arena import Arena
from smoe.memory.disk import DiskReader
from smoe.memory.store import ExpertStore, Read, page_ceil
from smoe.user_cache import cache_folder

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
        count = _write(path, size, file_bytes)
        order = [n * 7919 % count for n in range(count)]  # a prime stride: scattered, and the same every time
        readers = EngineConfig().io_threads
        started = perf_counter()
        with ThreadPoolExecutor(readers) as pool:
            parts = [order[n::readers] for n in range(readers)]
            done = sum(pool.map(lambda part: _read_some(reader, path, size, part, started + seconds), parts))
        return done / (perf_counter() - started), reader.is_direct
    finally:
        reader.close()
        with suppress(FileNotFoundError):
            path.unlink()


def measure_reads(store: ExpertStore, seconds: float) -> float:
    """Bytes per second of reading a model's own experts past the page cache, scattered, by as many threads as the
    engine uses."""
    keys, readers = store.keys(), EngineConfig().io_threads
    order = [keys[n * 7919 % len(keys)] for n in range(len(keys))]
    reads = [store.reads(*key) for key in order]
    largest = max(read.nbytes for of in reads for read in of)
    reader, started = DiskReader(direct=True), perf_counter()

    def read_some(part: Sequence[Sequence[Read]]) -> int:
        arena, done = Arena([(1, page_ceil(largest))], torch.device("cpu")), 0
        for of_expert in part:
            done += sum(reader.read(read, arena.buffer(0)) for read in of_expert)
            if perf_counter() > started + seconds:
                break
        arena.close()
        return done

    try:
        with ThreadPoolExecutor(readers) as pool:
            done = sum(pool.map(read_some, [reads[n::readers] for n in range(readers)]))
        return done / (perf_counter() - started)
    finally:
        reader.close()


def measure_small_disk(request_bytes: int) -> float | None:
    """A short look at the disk of the user's cache folder: 64 MiB; None where nothing can be written there."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return measure_disk(folder, min(request_bytes, _SMALL_FILE_BYTES), 0.3, _SMALL_FILE_BYTES)[0]
    except OSError:
        return None


def _read_some(reader: DiskReader, path: Path, size: int, order: Sequence[int], until: float) -> int:
    """Bytes read until the clock says `until`."""
    arena = Arena([(1, size)], torch.device("cpu"))
    done = 0
    for n in order:
        done += reader.read(Read(path, n * size, size, 0, size), arena.buffer(0))
        if perf_counter() > until:
            break
    arena.close()
    return done


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
