"""Files that are there whole or not at all, whatever ends the program."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_IN_USE = (5, 32)
"""Windows' errors of a file that another process has open: a reader, or a virus scanner."""
_TRIES = 10
_FIRST_PAUSE_SECONDS = 0.002


def partial_of(path: Path) -> Path:
    """Where this process writes what will be `path`: next to it, so that renaming it is one step."""
    return path.with_name(f"{path.name}.partial-{os.getpid()}")


def take_place(partial: Path, path: Path) -> None:
    """Have a finished file, which is not open here, be `path`, in one step.

    Windows lets no file replace one that is being read: readers are waited for, a second at most.
    Raises `OSError`.
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
    """A file open for writing that becomes `path`, on disk, where the block ends well, and else leaves nothing.

    Raises `OSError`.
    """
    partial = partial_of(path)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        take_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)
