"""How far smoe's own CPU kernels may go: a limit from the environment."""

from __future__ import annotations

import os

from smoe.errors import ConfigError

CPU_ISA = ("none", "avx2", "avx512", "avx512_bf16", "all")
"""Values of `SMOE_MAX_CPU_ISA`, each with what the one before it has."""


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
