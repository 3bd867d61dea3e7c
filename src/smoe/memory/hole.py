"""Sparse files, whose unwritten ranges take no disk space."""

from __future__ import annotations

import sys
from typing import IO, Any

from smoe.memory.kernel32 import FSCTL_SET_SPARSE, U32, kernel32


def lengthen(file: IO[bytes], nbytes: int) -> None:
    """Extend a file that is open for writing to at least `nbytes`, with a hole if the file system supports it.

    On Windows the file must first be declared sparse and its last byte written, or the range would be filled with
    zeros. The file position does not change. Raises `OSError`.
    """
    place, end = file.tell(), file.seek(0, 2)
    if end < nbytes and sys.platform == "win32":
        _declare_sparse(file)
        file.seek(nbytes - 1)
        file.write(b"\0")
    elif end < nbytes:
        file.truncate(nbytes)
    file.seek(place)


def _declare_sparse(file: IO[bytes]) -> None:
    import msvcrt

    library: Any = msvcrt  # its names are missing on other systems
    file.flush()
    handle = library.get_osfhandle(file.fileno())
    kernel32().calls.DeviceIoControl(handle, FSCTL_SET_SPARSE, None, 0, None, 0, U32(), None)
