"""The kinds of numbers in machine code, as llvmlite has them."""

from __future__ import annotations

from typing import Any, TypeAlias

from llvmlite import ir

Value: TypeAlias = Any
"""A number or a register in the making: llvmlite has no types for them."""
BYTE, HALF_WORD, WORD, LONG = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF, FLOAT = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()


class _BFloat(ir.Type):
    """bf16 as a type of LLVM's, which llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()
