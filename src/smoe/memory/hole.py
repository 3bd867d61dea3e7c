"""Makes sparse files, in which ranges that were never written take no disk space."""

from __future__ import annotations

import sys
from typing import IO, Any

from smoe.memory.kernel32 import FSCTL_SET_SPARSE, U32, kernel32


def lengthen(file: IO[bytes], nbytes: int) -> None:
    """Extend a file that is open for writing to at least `nbytes`. The new range takes no disk space if the file system
    supports sparse files.

    On Windows the file must first be declared sparse and its last byte written; otherwise the system would fill the
    range with zeros. The file position does not change. Raises `OSError`.
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

    library: Any = msvcrt  # msvcrt exists only on Windows, for type checkers too
    file.flush()
    handle = library.get_osfhandle(file.fileno())
    kernel32().calls.DeviceIoControl(handle, FSCTL_SET_SPARSE, None, 0, None, 0, U32(), None)
