"""The types of numbers in generated machine code, as objects of llvmlite."""

from __future__ import annotations

from typing import Any, TypeAlias

from llvmlite import ir

Value: TypeAlias = Any
"""A number or register in generated code; llvmlite has no type annotations for them."""
BIT, BYTE, HALF_WORD, WORD, LONG = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()


class _BFloat(ir.Type):
    """LLVM's bf16 type, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()
