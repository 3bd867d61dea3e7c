"""Locks that let only one process at a time write a file or folder.

On POSIX systems the lock is `flock` on the file or folder itself. On Windows it is a locked byte of a separate lock
file, because folders cannot be opened there and other processes cannot read a locked byte. The lock file lies next to a
file, or in a folder, and is deleted afterwards.
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
"""The error codes of Windows' C library when another process holds the lock."""


class FileLock:
    """A lock on a file or folder, which this process holds until `close` or until it ends. A missing file is created.

    Raise `BlockingIOError` if another process holds the lock, and `OSError` for other failures.
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
        """Release the lock; a second call does nothing. `ours`: whether this process held the lock, so that the lock
        file is deleted."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._lock_file is not None and ours:
                with suppress(OSError):  # another process may have opened the lock file meanwhile
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

    library: Any = msvcrt  # typed Any because its names exist only on Windows
    try:
        library.locking(descriptor, library.LK_NBLCK, 1)
    except OSError as error:
        if error.errno not in _HELD:
            raise
        raise BlockingIOError(errno.EAGAIN, "another process has it") from error
