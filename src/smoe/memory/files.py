"""Files of experts: their identity, and reads of byte ranges past the page cache where the file system allows it.

Direct reads keep experts out of the page cache, which under a memory limit would compete with the slots for RAM, and
they save a copy. They require an aligned address, offset and length, which `memory/store.py` arranges, and are
requested by the method of each operating system:

    Linux, FreeBSD    `O_DIRECT`, `preadv`      address, offset and length must be whole sectors
    macOS             `F_NOCACHE`, `preadv`     unaligned reads are allowed, with an additional copy
    Windows           `FILE_FLAG_NO_BUFFERING`  as Linux (`windows_file.py`)

Read requests are multiples of `PAGE` (`store.py`), which is a multiple of the sector size of all common disks. If a
file system refuses direct reads (tmpfs, some network file systems), reads are buffered and their pages are dropped
afterwards. If RAM is much larger than the model, the page cache is better, and `direct=False` uses it.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from smoe.errors import CheckpointError, TransferError

if TYPE_CHECKING:
    from smoe.memory.store import Read

CHUNK_BYTES = 4 * 2**20
"""The size of a prefetch's read requests: nearly full speed, and a demand load waits for one chunk at most."""
REQUEST_BYTES = 64 * 2**20
"""The largest read request of demand loads. Reading a whole expert at once is a fifth faster than in chunks and takes
less CPU time (docs/log/disk.md)."""
TRIES = 6
"""The number of attempts for reads that are interrupted or find a full queue, with doubling pauses."""
_PASSING = (errno.EINTR, errno.EAGAIN)
_FIRST_PAUSE_SECONDS = 0.001

_T = TypeVar("_T")


class FileIdentity(NamedTuple):
    """The identity and state of a file; writing the file changes it."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int


def identity_of(descriptor: int) -> FileIdentity:
    """Return the identity of an open file."""
    found = os.fstat(descriptor)
    return FileIdentity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def check_identity(path: Path, descriptor: int, expected: FileIdentity) -> None:
    """Raise `CheckpointError` if an open file differs from what it was when it was indexed."""
    if identity_of(descriptor) != expected:
        raise CheckpointError(
            f"{path} was written or replaced while the model was loaded; what is read from it now belongs to other "
            "weights: load the model again"
        )


class ExpertFile(Protocol):
    """A file open for reading; several threads may read concurrently."""

    descriptor: int
    """The descriptor for `fstat`, to identify the file and its state."""
    is_direct: bool
    """Whether reads bypass the page cache."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read from `offset` into the buffer with one request; return the number of bytes, 0 at the end of the file.

        Releases the interpreter lock. Raises `OSError`, with `EINVAL` if a direct read is refused.
        """

    def forget(self, offset: int, nbytes: int) -> None:
        """Advise the system to drop these bytes from the page cache, for files that are not direct."""

    def close(self) -> None: ...


Opening = Callable[[Path, bool], ExpertFile]
"""A function (path, directly) that opens a file. Raises `OSError`, with `EINVAL` if it cannot be read directly."""


class PosixFile:
    """A file that is read by its descriptor, on systems other than Windows."""

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


def _is_uncached(descriptor: int) -> bool:
    """Disable caching of the file; return False if the system cannot."""
    import fcntl

    if not hasattr(fcntl, "F_NOCACHE"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    except OSError:
        return False
    return True


def opening() -> Opening:
    """Return this system's function for opening files."""
    if sys.platform == "win32":
        from smoe.memory.windows_file import WindowsFile

        return WindowsFile
    return PosixFile


def direct_name() -> str:
    """Return this system's name for reading past the page cache."""
    return {"darwin": "F_NOCACHE", "win32": "unbuffered"}.get(sys.platform, "O_DIRECT")


class DiskReader:
    """The open files of one store. Several threads may call `read`."""

    def __init__(self, direct: bool, opened: Opening | None = None) -> None:
        """`opened`: the function that opens files; None: this system's own."""
        self._wants_direct = direct
        self._opening = opened or opening()
        self._lock = threading.Lock()
        self._files: dict[Path, ExpertFile] = {}
        self._retired: list[ExpertFile] = []
        self._identities: dict[Path, FileIdentity] = {}

    def expect(self, identities: Mapping[Path, FileIdentity]) -> None:
        """Set the identities of files; a file that differs from its identity before or after a read is refused."""
        self._identities.update(identities)

    @property
    def is_direct(self) -> bool:
        """Whether all files opened so far bypass the page cache."""
        return bool(self._files) and all(file.is_direct for file in self._files.values())

    def read(self, read: Read, buffer: memoryview, between: Callable[[], None] | None = None) -> int:
        """Read into `buffer` from its beginning; return the number of bytes, at least `read.need`.

        `between` is called between two chunks, so that a more urgent read can go first. Raises `TransferError` if the
        system cannot read, and `CheckpointError` if the file was written since it was indexed.
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
            self._check_identity(read.path, file)  # a truncated file has been written
            if file.is_direct and error.errno == errno.EINVAL:
                self._reopen_buffered(read.path)
                return self.read(read, buffer, between)
            raise TransferError(
                error.errno or errno.EIO, f"cannot read {read.path} at {read.offset}: {error}"
            ) from error
        self._check_identity(read.path, file)  # checking afterwards also detects a change during the read
        if self._wants_direct and not file.is_direct:
            file.forget(read.offset, read.nbytes)
        return done

    def close(self) -> None:
        """Close all files; no read may be running."""
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
        """Open a file again for buffered reads: some file systems allow opening for direct reads and then refuse
        these."""
        with self._lock:
            file = self._files[path]
            if file.is_direct:
                self._retired.append(file)  # other threads may still be reading from it
                self._files[path] = self._opened(path, False)

    def _pread(self, file: ExpertFile, buffer: memoryview, offset: int) -> int:
        return _insistently(lambda: file.read_into(buffer, offset))


def _insistently(call: Callable[[], _T]) -> _T:
    """Return the result of `call`, retried after temporary errors."""
    for attempt in range(TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)
    return call()
