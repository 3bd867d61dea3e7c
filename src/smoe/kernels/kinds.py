"""The types of numbers in generated machine code, as objects of llvmlite."""

from __future__ import annotations

from typing import Any, TypeAlias

from llvmlite import ir

Value: TypeAlias = Any
"""A number or register in generated code; llvmlite has no type annotations for them."""
BYTE, HALF_WORD, WORD, LONG = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF, FLOAT = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()


class _BFloat(ir.Type):
    """LLVM's bf16 type, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()
