"""Reads CPU features of aarch64 from the operating system, because LLVM does not report them on every system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import NamedTuple


class _Source(NamedTuple):
    """Where each system reports a feature: a bit of Linux's `AT_HWCAP`, and a name of macOS's `sysctl`."""

    bit: int
    name: str


_FEATURES = {
    "lse": _Source(8, "hw.optional.arm.FEAT_LSE"),
    "dotprod": _Source(20, "hw.optional.arm.FEAT_DotProd"),
}
"""The features that our kernels need, by LLVM's names: atomic additions in one instruction, and dot products of four
bytes."""
_AT_HWCAP = 16


def arm_features() -> dict[str, bool]:
    """Return for each CPU feature that our kernels need, by LLVM's name, whether this CPU has it.

    Every aarch64 CPU has NEON. A feature that the operating system does not report counts as missing.
    """
    has = {"linux": _on_linux, "darwin": _on_macos}.get(sys.platform)
    return {"neon": True} | {name: has is not None and has()(source) for name, source in _FEATURES.items()}


def _on_linux() -> Callable[[_Source], bool]:
    auxiliary = ctypes.CDLL(None).getauxval
    auxiliary.argtypes, auxiliary.restype = (ctypes.c_ulong,), ctypes.c_ulong
    bits = int(auxiliary(_AT_HWCAP))
    return lambda source: bool(bits >> source.bit & 1)


def _on_macos() -> Callable[[_Source], bool]:
    ask = ctypes.CDLL(None).sysctlbyname

    def is_said(source: _Source) -> bool:
        value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
        failed = ask(source.name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
        return not failed and value.value != 0

    return is_said
