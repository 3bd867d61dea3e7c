"""Reads system values of macOS by their names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_MOST_BYTES = 256


def sysctl_int(name: str) -> int | None:
    """Return the macOS system value `name`, which is a number; None if the system has no such value."""
    found = _asked(name)
    return int.from_bytes(found, "little") if found is not None and len(found) in (4, 8) else None


def sysctl_text(name: str) -> str | None:
    """Return the macOS system value `name`, which is a string; None if the system has no such value."""
    found = _asked(name)
    return None if found is None else found.rstrip(b"\0").decode(errors="replace")


def _asked(name: str) -> bytes | None:
    found, nbytes = ctypes.create_string_buffer(_MOST_BYTES), ctypes.c_size_t(_MOST_BYTES)
    if _sysctlbyname()(name.encode(), found, ctypes.byref(nbytes), None, 0):
        return None
    return found.raw[: nbytes.value]


@cache
def _sysctlbyname() -> Callable[..., int]:
    function = ctypes.CDLL(None).sysctlbyname
    size = ctypes.c_size_t
    function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(size), ctypes.c_void_p, size)
    call: Callable[..., int] = function
    return call
