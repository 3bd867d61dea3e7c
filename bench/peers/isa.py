"""Instruction sets that a comparison is limited to."""

from __future__ import annotations

from typing import Literal, get_args

Isa = Literal["native", "avx2"]
ISAS: tuple[str, ...] = get_args(Isa)

VARIABLES: dict[Isa, dict[str, str]] = {
    "native": {},
    "avx2": {"SMOE_MAX_CPU_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
"""What a process of ours is told: our kernels, torch's, oneDNN's. Other engines have a program for each."""
