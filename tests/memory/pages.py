"""What lies in the file that is read from, and reads of whole pages of it."""

from __future__ import annotations

import random
from pathlib import Path

from smoe.memory.store import PAGE, Read

SIZE = 20 * PAGE + 123
DATA = random.Random(0).randbytes(SIZE)


def pages(path: Path, offset: int = 0, count: int = 20, need: int | None = None) -> Read:
    """`count` pages from `offset` on, of which `need` bytes must be there."""
    return Read(path, offset, count * PAGE, 0, count * PAGE if need is None else need)
