"""Files that are longer than what was written to them: what is between takes no room on a disk."""

from __future__ import annotations

import sys
from typing import IO, Any

from smoe.memory.kernel32 import FSCTL_SET_SPARSE, U32, kernel32


def lengthen(file: IO[bytes], nbytes: int) -> None:
    """Make a file, open for writing, at least as long as that; what is new is a hole, where the file system has such.

    Windows fills what is added with zeros, unless the file has been declared to have holes and its last byte is
    written. The place in the file stays as it is. Raises `OSError`.
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

    library: Any = msvcrt  # whose names are not there on other systems
    file.flush()
    handle = library.get_osfhandle(file.fileno())
    kernel32().calls.DeviceIoControl(handle, FSCTL_SET_SPARSE, None, 0, None, 0, U32(), None)
