"""Files and folders that one process at a time writes to, each system in its own way.

POSIX      `flock` on the file or folder itself
Windows    a byte of a file next to it (in it, of a folder), which goes with the lock: a folder cannot be opened there,
           and no other process can read what is locked of a file
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
"""What Windows' C library says where another process has the byte."""


class FileLock:
    """`path`, a folder, or a file that is made where there is none, is this process's until `close`, or its end.

    Raises `BlockingIOError` where another process has it, `OSError`.
    """

    def __init__(self, path: Path) -> None:
        self._lock_file: Path | None = None
        if sys.platform == "win32":
            self._lock_file = path / ".lock" if path.is_dir() else path.with_name(f"{path.name}.lock")
        what = path if self._lock_file is None else self._lock_file
        self._descriptor = os.open(what, os.O_RDONLY if what.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _take(self._descriptor)
        except BaseException:
            self.close(ours=False)
            raise

    def close(self, ours: bool = True) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._lock_file is not None and ours:
                with suppress(OSError):  # another process has it by now
                    self._lock_file.unlink(missing_ok=True)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _take(descriptor: int) -> None:
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    library: Any = msvcrt  # whose names are not there on other systems
    try:
        library.locking(descriptor, library.LK_NBLCK, 1)
    except OSError as error:
        if error.errno not in _HELD:
            raise
        raise BlockingIOError(errno.EAGAIN, "another process has it") from error
