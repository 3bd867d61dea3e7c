"""Limit the C library's heap. This module imports nothing heavy, because its settings apply to threads that start
later.

glibc gives threads heaps of their own (arenas, up to eight per core) and keeps freed memory for later use. A server
whose threads process prompts of different lengths would keep the largest one in each arena.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

MOST_ARENAS = 4
"""The number of arenas. Python has its own heap for small objects, and most threads wait for a step or for Python's
lock, so a few suffice. With two, decoding was some per cent slower."""
_ARENA_MAX = -8
"""glibc's number for mallopt's option M_ARENA_MAX."""
_BY_HAND = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
"""Environment variables by which a user configures the heap; then nothing is set here."""


def bound_heap() -> bool:
    """Limit the number of arenas; return False without glibc or if the user has configured it."""
    library = _glibc()
    if library is None or any(os.environ.get(name) for name in _BY_HAND):
        return False
    return bool(library.mallopt(_ARENA_MAX, MOST_ARENAS) == 1)


def give_back_heap() -> None:
    """Return free pages of the heap to the system. Takes milliseconds and releases the interpreter lock."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> Any:
    """Return glibc, or None with another C library."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
