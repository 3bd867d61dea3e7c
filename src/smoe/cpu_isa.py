"""How far smoe's own CPU kernels may go: a limit from the environment."""

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
    """Whose instruction sets a machine has, by the operating system's name for it; one of 32 bits has none that we
    know, and counts as `X86`, of which nothing will be found there."""
    return AARCH64 if is_wide and machine.lower() in ("aarch64", "arm64") else X86


FAMILY = family_of(platform.machine(), sys.maxsize > 1 << 32)
CPU_ISA = _LEVELS[FAMILY]
"""Values of `SMOE_MAX_CPU_ISA` on this machine, each with what the one before it has."""


def max_cpu_isa() -> str:
    """The vector extensions that smoe's own CPU kernels may use: the environment's `SMOE_MAX_CPU_ISA`, else all.

    For comparisons and tests; torch, oneDNN and MKL have such limits of their own. Raises `ConfigError` for a value
    that is none of `CPU_ISA`.
    """
    value = os.environ.get("SMOE_MAX_CPU_ISA", "").strip().lower() or "all"
    if value not in CPU_ISA:
        allowed = ", ".join(CPU_ISA)
        message = f"the environment's SMOE_MAX_CPU_ISA is {value!r}; choose one of: {allowed}"
        raise ConfigError(message, setting="SMOE_MAX_CPU_ISA", given=value, allowed=allowed)
    return value
