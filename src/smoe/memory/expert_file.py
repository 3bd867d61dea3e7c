"""Files for reading experts past the page cache, by the method of each operating system.

    Linux, FreeBSD    `O_DIRECT`, `preadv`      address, offset and length must be whole sectors
    macOS             `F_NOCACHE`, `preadv`     unaligned reads are allowed, with an additional copy
    Windows           `FILE_FLAG_NO_BUFFERING`  as Linux (`windows_file.py`)

Read requests are multiples of `PAGE` (`store.py`), which is a multiple of the sector size of all common disks.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


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
