"""The instruction sets that smoe's own CPU kernels may use. The environment variable SMOE_MAX_CPU_ISA limits them."""

from __future__ import annotations

import os
import platform
import sys

from smoe.errors import ConfigError

X86, AARCH64 = "x86", "aarch64"
_LEVELS = {
    X86: ("none", "avx2", "avx_vnni", "avx512", "avx512_bf16", "all"),
    AARCH64: ("none", "neon", "neon_dotprod", "all"),
}


def family_of(machine: str, is_wide: bool = True) -> str:
    """Return the processor family, `X86` or `AARCH64`, for `machine`, the name that `platform.machine()` returns.
    Unknown machines, and those that are not `is_wide` (64 bits), count as `X86`; no instruction set will be found
    there."""
    return AARCH64 if is_wide and machine.lower() in ("aarch64", "arm64") else X86


FAMILY = family_of(platform.machine(), sys.maxsize > 1 << 32)
CPU_ISA = _LEVELS[FAMILY]
"""The values of `SMOE_MAX_CPU_ISA` on this machine, ascending. Each value includes the instruction sets of the values
before it."""


def max_cpu_isa() -> str:
    """Return the highest instruction set that smoe's own CPU kernels may use: the value of the environment variable
    `SMOE_MAX_CPU_ISA`, or "all". Raise `ConfigError` if the value is not in `CPU_ISA`.

    The limit is for comparisons and tests; torch, oneDNN and MKL have limits of their own.
    """
    value = os.environ.get("SMOE_MAX_CPU_ISA", "").strip().lower() or "all"
    if value not in CPU_ISA:
        allowed = ", ".join(CPU_ISA)
        message = f"the environment's SMOE_MAX_CPU_ISA is {value!r}; choose one of: {allowed}"
        raise ConfigError(message, setting="SMOE_MAX_CPU_ISA", given=value, allowed=allowed)
    return value
