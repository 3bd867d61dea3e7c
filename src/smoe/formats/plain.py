"""Unquantized numbers, declared as formats. They are for experts of which only some matrices are quantized."""

from __future__ import annotations

from smoe.formats.base import Field, Format, Group, Run, Scalar

_NUMBERS = 16
"""The number of elements in a block, which is the number that kernels read of a row at a time."""


def _plain(name: str, size: int) -> Format:
    groups = (Group((Run(0, _NUMBERS, (Field(0),)),)),)
    return Format(name, _NUMBERS, size * _NUMBERS, Scalar(0, "ONE"), groups, reals=name)


PLAIN = {name: _plain(name, size) for name, size in (("F32", 4), ("F16", 2), ("BF16", 2))}
