"""The disk: page-aligned reads of byte ranges, past the page cache where the file system allows.

Reading directly keeps experts out of the page cache, which under a memory limit would fight our slots for the same RAM,
and saves a copy. It needs aligned address, offset and length, which `memory/store.py` arranges; how it is asked for is
each system's own (`memory/expert_file.py`). Where it is refused (tmpfs, some network file systems) reads are buffered
and the pages are dropped behind the reader. Where RAM exceeds the model by far, the page cache is the better place and
`direct=False` uses it.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from smoe.errors import CheckpointError, TransferError
from smoe.memory.expert_file import ExpertFile, Opening, opening
from smoe.memory.safetensors_index import FileIdentity, check_identity
from smoe.memory.store import Read

CHUNK_BYTES = 4 * 2**20
"""Prefetches are read in chunks of this size: near the best rate, and a demand load waits for one chunk at most."""
REQUEST_BYTES = 64 * 2**20
"""Demand loads are read in as few requests as the system takes: a whole expert at once is a fifth faster than in
chunks, and costs less of the processor (docs/log/disk.md)."""
TRIES = 6
"""A read that was interrupted, or found no room in a queue, is worth a second try, after a pause that doubles."""
_PASSING = (errno.EINTR, errno.EAGAIN)
_FIRST_PAUSE_SECONDS = 0.001

_T = TypeVar("_T")


class DiskReader:
    """Open files of one store. `read` may be called from several threads."""

    def __init__(self, direct: bool, opened: Opening | None = None) -> None:
        """`opened`: how files are opened (None: this system's way)."""
        self._wants_direct = direct
        self._opening = opened or opening()
        self._lock = threading.Lock()
        self._files: dict[Path, ExpertFile] = {}
        self._retired: list[ExpertFile] = []
        self._identities: dict[Path, FileIdentity] = {}

    def expect(self, identities: Mapping[Path, FileIdentity]) -> None:
        """Refuse a file that changes from now on, before and after its bytes are read."""
        self._identities.update(identities)

    @property
    def is_direct(self) -> bool:
        """Whether every file opened so far bypasses the page cache."""
        return bool(self._files) and all(file.is_direct for file in self._files.values())

    def read(self, read: Read, buffer: memoryview, between: Callable[[], None] | None = None) -> int:
        """Fill `buffer` with `read`'s bytes, from its first byte; returns the bytes that came, at least `read.need`.

        `between` is called between two chunks, so that something more urgent can use the disk there.
        Raises `TransferError` where the system cannot read, `CheckpointError` for a file written since it was indexed.
        """
        file = self._open(read.path)
        done, request = 0, REQUEST_BYTES if between is None else CHUNK_BYTES
        try:
            while done < read.need:
                if done and between is not None:
                    between()
                came = self._pread(file, buffer[done : min(done + request, read.nbytes)], read.offset + done)
                if came == 0:
                    raise OSError(errno.EIO, "the file ends early")
                done += came
        except OSError as error:
            self._check_identity(read.path, file)  # a file cut short is one that was written
            if file.is_direct and error.errno == errno.EINVAL:
                self._reopen_buffered(read.path)
                return self.read(read, buffer, between)
            raise TransferError(
                error.errno or errno.EIO, f"cannot read {read.path} at {read.offset}: {error}"
            ) from error
        self._check_identity(read.path, file)  # afterwards: it tells of a change during the read, too
        if self._wants_direct and not file.is_direct:
            file.forget(read.offset, read.nbytes)
        return done

    def close(self) -> None:
        """Close every file; no read may be under way."""
        with self._lock:
            for file in [*self._retired, *self._files.values()]:
                file.close()
            self._files.clear()
            self._retired.clear()

    def _check_identity(self, path: Path, file: ExpertFile) -> None:
        expected = self._identities.get(path)
        if expected is not None:
            check_identity(path, file.descriptor, expected)

    def _open(self, path: Path) -> ExpertFile:
        known = self._files.get(path)
        if known is not None:
            return known
        with self._lock:
            if path not in self._files:
                self._files[path] = self._open_now(path)
            return self._files[path]

    def _open_now(self, path: Path) -> ExpertFile:
        try:
            if self._wants_direct:
                try:
                    return self._opened(path, True)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            return self._opened(path, False)
        except OSError as error:
            raise TransferError(error.errno or errno.EIO, f"cannot open {path}: {error.strerror}") from error

    def _opened(self, path: Path, direct: bool) -> ExpertFile:
        file = self._opening(path, direct)
        try:
            self._check_identity(path, file)
        except CheckpointError:
            file.close()
            raise
        return file

    def _reopen_buffered(self, path: Path) -> None:
        """Some file systems let a file be opened for direct reads and refuse them."""
        with self._lock:
            file = self._files[path]
            if file.is_direct:
                self._retired.append(file)  # other threads may still be reading through it
                self._files[path] = self._opened(path, False)

    def _pread(self, file: ExpertFile, buffer: memoryview, offset: int) -> int:
        return _insistently(lambda: file.read_into(buffer, offset))


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
