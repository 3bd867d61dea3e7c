"""The disk: page-aligned reads of byte ranges, past the page cache where the file system allows.

`O_DIRECT` keeps experts out of the page cache, which under a memory limit would fight our slots for the same RAM, and
saves a copy. It needs aligned address, offset and length, which `memory/store.py` arranges. Where it is refused
(tmpfs, some network and other systems' file systems) reads are buffered and the pages are dropped behind the reader.
Where RAM exceeds the model by far, the page cache is the better place and `direct=False` uses it.

`os.preadv` releases the interpreter lock, so a reading thread does not slow a computing one.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from smoe.errors import CheckpointError, TransferError
from smoe.memory.safetensors_index import FileIdentity, check_identity
from smoe.memory.store import Read

CHUNK_BYTES = 4 * 2**20
"""Prefetches are read in chunks of this size: near the best rate, and a demand load waits for one chunk at most."""
REQUEST_BYTES = 64 * 2**20
"""Demand loads are read in as few requests as the system takes: a whole expert at once is a fifth faster than in
chunks, and costs less of the processor (docs/log.md)."""
TRIES = 6
"""A read that was interrupted, or found no room in a queue, is worth a second try, after a pause that doubles."""
_PASSING = (errno.EINTR, errno.EAGAIN)
_FIRST_PAUSE_SECONDS = 0.001

_DIRECT = getattr(os, "O_DIRECT", 0)
_T = TypeVar("_T")


class DiskReader:
    """Open files of one store. `read` may be called from several threads."""

    def __init__(self, direct: bool) -> None:
        self._wants_direct = direct and bool(_DIRECT)
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[int, bool]] = {}
        self._retired: list[int] = []
        self._identities: dict[Path, FileIdentity] = {}

    def expect(self, identities: Mapping[Path, FileIdentity]) -> None:
        """From now on a file that is not as it was then is refused, before and after its bytes are read."""
        self._identities.update(identities)

    @property
    def is_direct(self) -> bool:
        """Whether every file opened so far bypasses the page cache."""
        return bool(self._files) and all(direct for _, direct in self._files.values())

    def read(self, read: Read, buffer: memoryview, between: Callable[[], None] | None = None) -> int:
        """Fill `buffer` with `read`'s bytes, from its first byte; returns the bytes that came, at least `read.need`.

        `between` is called between two chunks, so that something more urgent can use the disk there.
        Raises `TransferError` where the system cannot read, `CheckpointError` for a file written since it was indexed.
        """
        descriptor, direct = self._open(read.path)
        done, request = 0, REQUEST_BYTES if between is None else CHUNK_BYTES
        try:
            while done < read.need:
                if done and between is not None:
                    between()
                came = self._pread(descriptor, buffer[done : min(done + request, read.nbytes)], read.offset + done)
                if came == 0:
                    raise OSError(errno.EIO, "the file ends early")
                done += came
        except OSError as error:
            self._check_identity(read.path, descriptor)  # a file cut short is one that was written
            if direct and error.errno == errno.EINVAL:
                self._reopen_buffered(read.path)
                return self.read(read, buffer, between)
            raise TransferError(
                error.errno or errno.EIO, f"cannot read {read.path} at {read.offset}: {error}"
            ) from error
        self._check_identity(read.path, descriptor)  # afterwards: it tells of a change during the read, too
        if self._wants_direct and not direct:
            _forget_pages(descriptor, read.offset, read.nbytes)
        return done

    def close(self) -> None:
        """Close every file; no read may be under way."""
        with self._lock:
            for descriptor in [*self._retired, *(descriptor for descriptor, _ in self._files.values())]:
                os.close(descriptor)
            self._files.clear()
            self._retired.clear()

    def _check_identity(self, path: Path, descriptor: int) -> None:
        expected = self._identities.get(path)
        if expected is not None:
            check_identity(path, descriptor, expected)

    def _open(self, path: Path) -> tuple[int, bool]:
        known = self._files.get(path)
        if known is not None:
            return known
        with self._lock:
            if path not in self._files:
                self._files[path] = self._open_now(path)
            return self._files[path]

    def _open_now(self, path: Path) -> tuple[int, bool]:
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            if self._wants_direct:
                try:
                    return self._opened(path, flags | _DIRECT), True
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            return self._opened(path, flags), False
        except OSError as error:
            raise TransferError(error.errno or errno.EIO, f"cannot open {path}: {error.strerror}") from error

    def _opened(self, path: Path, flags: int) -> int:
        descriptor = os.open(path, flags)
        try:
            self._check_identity(path, descriptor)
        except CheckpointError:
            os.close(descriptor)
            raise
        return descriptor

    def _reopen_buffered(self, path: Path) -> None:
        """Some file systems accept O_DIRECT on open and refuse it on read."""
        with self._lock:
            descriptor, direct = self._files[path]
            if direct:
                self._retired.append(descriptor)  # other threads may still be reading through it
                self._files[path] = (self._opened(path, os.O_RDONLY), False)

    def _pread(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return _insistently(lambda: os.preadv(descriptor, [buffer], offset))
        with self._lock:  # systems without positioned reads: one at a time
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = _insistently(lambda: os.read(descriptor, len(buffer)))
        buffer[: len(data)] = data
        return len(data)


def _insistently(call: Callable[[], _T]) -> _T:
    """`call`'s result; what passes by itself is tried again."""
    for attempt in range(TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)
    return call()


def _forget_pages(descriptor: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
