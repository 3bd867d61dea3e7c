"""Limits the C library's heap. This module imports nothing heavy, because its settings apply only to threads that start
later.

glibc gives threads heaps of their own (its arenas, up to eight per core), and does not return freed memory at once. A
server whose threads process prompts of different lengths would hold the memory of the longest prompt in each of these
heaps.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

MOST_ARENAS = 4
"""The maximum number of glibc's arenas. Python has its own heap for small objects, and most threads wait for a step or
for Python's lock, so a few are enough. With two, decoding was some per cent slower."""
_ARENA_MAX = -8
"""The number of mallopt's option M_ARENA_MAX in glibc."""
_BY_HAND = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
"""Environment variables with which a user configures the heap. If one is set, nothing is set here."""


def bound_heap() -> bool:
    """Limit the number of glibc's heaps. Return False if the C library is another one, or if the user has configured
    the heap."""
    library = _glibc()
    if library is None or any(os.environ.get(name) for name in _BY_HAND):
        return False
    return bool(library.mallopt(_ARENA_MAX, MOST_ARENAS) == 1)


def give_back_heap() -> None:
    """Return free pages of the heap to the operating system. Takes milliseconds and releases the interpreter lock."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> Any:
    """Return glibc, or None if the C library is another one."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
