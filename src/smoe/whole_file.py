"""Files that are there whole or not at all, whatever ends the program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def partial_of(path: Path) -> Path:
    """Where this process writes what will be `path`: beside it, so that renaming it is one step."""
    return path.with_name(f"{path.name}.partial-{os.getpid()}")


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
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
