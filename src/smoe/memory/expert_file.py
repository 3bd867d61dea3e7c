"""A file that experts are read from, past the page cache where the system has a way: each system in its own.

    Linux, FreeBSD    `O_DIRECT`, `preadv`      address, offset and length in whole sectors, or the read is refused
    macOS             `F_NOCACHE`, `preadv`     nothing is refused; what is not aligned is copied once more
    Windows           `FILE_FLAG_NO_BUFFERING`  as Linux (`windows_file.py`)

Whatever is asked of such a file is a multiple of `PAGE` (`store.py`), which every sector of today divides.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class ExpertFile(Protocol):
    """Open for reading; several threads may read at once, each its own bytes."""

    descriptor: int
    """The descriptor for `fstat`: which file it is, and in which state."""
    is_direct: bool
    """Whether what is read stays out of the page cache."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the buffer with the bytes from `offset` on, as far as one request goes; 0 at the end of the file.

        Lets other threads of Python run meanwhile. Raises `OSError`; with `EINVAL` where reading directly is refused.
        """

    def forget(self, offset: int, nbytes: int) -> None:
        """For a file that is not direct: these bytes need not stay in the page cache, where the system takes such
        advice."""

    def close(self) -> None: ...


Opening = Callable[[Path, bool], ExpertFile]
"""(path, directly): the open file. Raises `OSError`; with `EINVAL` where it cannot be read directly."""


class PosixFile:
    """Reads by a descriptor, on any system that is not Windows."""

    def __init__(self, path: Path, direct: bool) -> None:
        flag = getattr(os, "O_DIRECT", 0) if direct else 0
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | flag)
        self.is_direct = direct
        if direct and not flag and not _is_uncached(self.descriptor):
            os.close(self.descriptor)
            raise OSError(errno.EINVAL, "no way past the page cache")

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
    """Have the system keep nothing of what is read from now on; False where it does not."""
    import fcntl

    if not hasattr(fcntl, "F_NOCACHE"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    except OSError:
        return False
    return True


def opening() -> Opening:
    """This system's way."""
    if sys.platform == "win32":
        from smoe.memory.windows_file import WindowsFile

        return WindowsFile
    return PosixFile


def direct_name() -> str:
    """What this system calls reading past the page cache."""
    return {"darwin": "F_NOCACHE", "win32": "unbuffered"}.get(sys.platform, "O_DIRECT")
