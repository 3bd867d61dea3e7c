"""Writes files completely or not at all, however the program ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_IN_USE = (5, 32)
"""The error codes of Windows for a file that another process has open, such as a reader or a virus scanner."""
_TRIES = 10
_FIRST_PAUSE_SECONDS = 0.002


def partial_of(path: Path) -> Path:
    """Return the path of the temporary file that this process writes in place of `path`. It is in the same folder, so
    that renaming it completes the file."""
    return path.with_name(f"{path.name}.partial-{os.getpid()}")


def take_place(partial: Path, path: Path) -> None:
    """Rename a complete, closed file to `path` in one step. Raise `OSError` on failure.

    Windows cannot replace a file that is being read, so this waits up to a second for readers.
    """
    for attempt in range(_TRIES):
        try:
            partial.replace(path)
            return
        except PermissionError as error:
            if getattr(error, "winerror", None) not in _IN_USE or attempt == _TRIES - 1:
                raise
            time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that is open for writing. If the `with` block ends without an exception, the file becomes `path`;
    otherwise it is deleted. Raise `OSError` on failure."""
    partial = partial_of(path)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        take_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)
