"""Files of experts: their identity, and reads of byte ranges, which bypass the page cache where the file system allows
it.

Such direct reads keep experts out of the page cache, which under a memory limit would compete with the slots for RAM,
and they save a copy. They require an aligned address, offset and length, which `memory/store.py` arranges. Each
operating system has its own way to request them:

    Linux, FreeBSD    `O_DIRECT`, `preadv`     address, offset and length must be whole sectors
    macOS             `F_NOCACHE`, `preadv`    unaligned reads are allowed, with an additional copy
    Windows           -                        reads are buffered, one at a time for each file

Read requests are multiples of `PAGE` (`store.py`), which is a multiple of the sector size of all common disks. If a
file system refuses direct reads (tmpfs, some network file systems), reads are buffered, and their pages are dropped
from the cache afterwards. If RAM is much larger than the model, the page cache is better, and `direct=False` uses it.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from smoe.errors import CheckpointError, TransferError
from smoe.memory.page_cache import CachedFile, cached_file

if TYPE_CHECKING:
    from smoe.memory.store import Read

CHUNK_BYTES = 4 * 2**20
"""The size of one read request of a prefetch: nearly full speed, and a demand load waits for one chunk at most."""
REQUEST_BYTES = 64 * 2**20
"""The largest read request of a demand load. Reading a whole expert at once is a fifth faster than reading it in
chunks, and takes less CPU time (docs/log/disk.md)."""
TRIES = 6
"""The number of attempts for a read that is interrupted or finds a full queue. The pauses between attempts double."""
_PASSING = (errno.EINTR, errno.EAGAIN)
_FIRST_PAUSE_SECONDS = 0.001

_T = TypeVar("_T")


class FileIdentity(NamedTuple):
    """The numbers that identify a file and its state: writing to the file or replacing it changes them."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int


def identity_of(descriptor: int) -> FileIdentity:
    """Return the identity of an open file: numbers that change when the file is written or replaced."""
    found = os.fstat(descriptor)
    return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def check_identity(path: Path, descriptor: int, expected: FileIdentity) -> None:
    """Raise `CheckpointError` if an open file has changed since it was indexed."""
    if identity_of(descriptor) != expected:
        raise CheckpointError(
            f"{path} was written or replaced while the model was loaded, so the bytes in it may belong to other "
            "weights: load the model again"
        )


class ExpertFile(Protocol):
    """A file that is open for reading. Several threads may read from it at once."""

    descriptor: int
    """The file descriptor, from which `fstat` finds the file's identity."""
    is_direct: bool
    """Whether reads bypass the page cache."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read from `offset` into the buffer with one request. Return the number of bytes, 0 at the end of the file.

        Releases the interpreter lock. Raises `OSError`, with `EINVAL` if a direct read is refused.
        """

    def forget(self, offset: int, nbytes: int) -> None:
        """Advise the operating system to drop a byte range of the file from the page cache. Only for files that are not
        read directly."""

    def close(self) -> None: ...


Opening = Callable[[Path, bool], ExpertFile]
"""A function (path, direct) that opens a file. Raises `OSError`, with `EINVAL` if the file cannot be read directly."""


class PosixFile:
    """A file that is read at offsets, on systems other than Windows."""

    def __init__(self, path: Path, direct: bool) -> None:
        flag = getattr(os, "O_DIRECT", 0) if direct else 0
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | flag)
        self.is_direct = direct
        if direct and not flag and not _is_uncached(self.descriptor):
            os.close(self.descriptor)
            raise OSError(errno.EINVAL, "reads past the page cache are not supported")

    def read_into(self, buffer: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.descriptor, [buffer], offset)
        data = os.pread(self.descriptor, len(buffer), offset)  # macOS before 11
        buffer[: len(data)] = data
        return len(data)

    def forget(self, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self.descriptor)


class BufferedFile:
    """A file that is read at its position, on systems that cannot read at offsets (Windows)."""

    is_direct = False

    def __init__(self, path: Path, direct: bool) -> None:
        if direct:
            raise OSError(errno.EINVAL, "reads past the page cache are not supported")
        self._file = path.open("rb", buffering=0)
        self.descriptor = self._file.fileno()
        self._lock = threading.Lock()

    def read_into(self, buffer: memoryview, offset: int) -> int:
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(buffer) or 0

    def forget(self, offset: int, nbytes: int) -> None:
        """Do nothing, because these systems have no call to drop pages from the cache."""

    def close(self) -> None:
        self._file.close()


def _is_uncached(descriptor: int) -> bool:
    """Disable caching of an open file. Return False if the system cannot."""
    import fcntl

    if not hasattr(fcntl, "F_NOCACHE"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    except OSError:
        return False
    return True


def opening() -> Opening:
    """Return the function that opens files on this operating system."""
    return BufferedFile if sys.platform == "win32" else PosixFile


def direct_name() -> str:
    """Return the name of this operating system's method for reading past the page cache."""
    return "F_NOCACHE" if sys.platform == "darwin" else "O_DIRECT"


class DiskReader:
    """Reads byte ranges of the files of one expert store, which stay open. Several threads may call `read`."""

    def __init__(self, direct: bool, opened: Opening | None = None, cached_first: bool = False) -> None:
        """`direct`: read past the page cache. `opened`: the function that opens files; None: this system's own.

        `cached_first`: with `direct`, copy ranges that are in the page cache from there."""
        self._wants_direct = direct
        self._is_cached_first = cached_first
        self._cached: dict[Path, CachedFile] = {}
        self.cached_bytes = 0
        """The number of bytes that were copied from the page cache although reads are direct."""
        self._opening = opened or opening()
        self._lock = threading.Lock()
        self._files: dict[Path, ExpertFile] = {}
        self._retired: list[ExpertFile] = []
        self._identities: dict[Path, FileIdentity] = {}

    def expect(self, identities: Mapping[Path, FileIdentity]) -> None:
        """Set the expected identities of files. If a file's identity differs before or after a read, the read fails."""
        self._identities.update(identities)

    @property
    def is_direct(self) -> bool:
        """Whether reads of all files opened until now bypass the page cache."""
        return bool(self._files) and all(file.is_direct for file in self._files.values())

    def read(
        self, read: Read, buffer: memoryview, between: Callable[[], None] | None = None, is_kept: bool = True
    ) -> int:
        """Read a byte range into `buffer`, from its beginning. Return the number of bytes read, at least `read.need`.

        `is_kept`: whether the bytes will stay in memory. If they will not, a range that is in the page cache stays
        there, so that it can be copied again.

        `between` is called between two chunks, so that a more urgent read can go first. Raises `TransferError` if the
        system cannot read, and `CheckpointError` if the file was written after it was indexed.
        """
        file = self._open(read.path)
        done, request = 0, REQUEST_BYTES if between is None else CHUNK_BYTES
        try:
            while done < read.need:
                if done and between is not None:
                    between()
                part = buffer[done : min(done + request, read.nbytes)]
                came = self._cached_bytes(read.path, part, read.offset + done, is_kept)
                came = came or self._pread(file, part, read.offset + done)
                if came == 0:
                    raise OSError(errno.EIO, "the file ends early")
                done += came
        except OSError as error:
            self._check_identity(read.path, file)  # a truncated file has been written
            if file.is_direct and error.errno == errno.EINVAL:
                self._reopen_buffered(read.path)
                return self.read(read, buffer, between, is_kept)
            raise TransferError(
                error.errno or errno.EIO, f"cannot read {read.path} at {read.offset}: {error}"
            ) from error
        self._check_identity(read.path, file)  # checking afterwards also detects a change during the read
        if self._wants_direct and not file.is_direct:
            file.forget(read.offset, read.nbytes)
        return done

    def cached_share(self, paths: Collection[Path]) -> float:
        """Return the smallest fraction, from 0 to 1, of one of the files `paths` that is in the page cache. It is 0
        unless reads are direct and copy what is in the page cache. Raises the errors of `read` that opening causes."""
        for path in paths:
            self._open(path)
        return min((self._cached[path].cached_share() if path in self._cached else 0.0 for path in paths), default=0.0)

    def close(self) -> None:
        """Close all files; no read may be running."""
        with self._lock:
            for file in [*self._retired, *self._files.values()]:
                file.close()
            for cached in self._cached.values():
                cached.close()
            self._cached.clear()
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
                file = self._open_now(path)
                is_asked = file.is_direct and self._is_cached_first
                cached = cached_file(path, file.descriptor) if is_asked else None
                if cached is not None:
                    self._cached[path] = cached
                self._files[path] = file
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
        """Open a file again for buffered reads. Some file systems allow opening a file for direct reads and then refuse
        to read."""
        with self._lock:
            file = self._files[path]
            if file.is_direct:
                self._retired.append(file)  # other threads may still be reading from it
                self._files[path] = self._opened(path, False)

    def _cached_bytes(self, path: Path, buffer: memoryview, offset: int, drops: bool) -> int:
        """Read from the page cache, if the whole range is there. Return the number of bytes, 0 otherwise."""
        cached = self._cached.get(path)
        if cached is None:
            return 0
        came = cached.read_into(buffer, offset, drops)
        if came:
            with self._lock:
                self.cached_bytes += came
        return came

    def _pread(self, file: ExpertFile, buffer: memoryview, offset: int) -> int:
        return _insistently(lambda: file.read_into(buffer, offset))


def _insistently(call: Callable[[], _T]) -> _T:
    """Return the result of `call`. After temporary errors, call it again."""
    for attempt in range(TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)
    return call()
