"""The C library's heap, prevented from growing by what is no longer used. Imports nothing heavy: what it sets holds for
threads that begin after it.

glibc gives threads heaps of their own (arenas, up to eight for each core) and keeps their freed memory for the next
caller. A server whose threads read prompts of mixed length would hold the largest one in each of them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

MOST_ARENAS = 4
"""Small objects of Python are in a heap of Python's own, and most threads wait for a step's end or for Python's lock:
a few arenas are enough for them. With two, decoding was some per cent slower."""
_ARENA_MAX = -8
"""glibc's name of the option."""
_BY_HAND = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
"""Variables by which a user chooses; then nothing is set here."""


def bound_heap() -> bool:
    """Bound the number of arenas. False where the C library has none, or the user has chosen."""
    library = _glibc()
    if library is None or any(os.environ.get(name) for name in _BY_HAND):
        return False
    return bool(library.mallopt(_ARENA_MAX, MOST_ARENAS) == 1)


def give_back_heap() -> None:
    """Give free pages of the heap back to the system. Takes milliseconds; Python's lock is free meanwhile."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> Any:
    """None where the C library is another one."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
