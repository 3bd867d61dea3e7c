"""A tile is 32 bf16 numbers of a key or value, loaded into one register and converted to float32.

one register    | d0 d1 | d2 d3 | d4 d5 | ...        two numbers in each 32 bits
in float32      | d0 | d2 | d4 | ...                 even elements: shifted up
                | d1 | d3 | d5 | ...                 odd elements: lower halves cleared
"""

from __future__ import annotations

from smoe.kernels.registers import filled

TILE = 32
"""The number of bf16 numbers in a tile."""


def fetched(at: str, name: str) -> str:
    """Return LLVM text that prefetches the address `%ahead` elements after `at`. An invalid address has no effect."""
    return f"""\
  %far{name} = getelementptr i16, ptr {at}, i64 %ahead
  call void @llvm.prefetch.p0(ptr %far{name}, i32 0, i32 2, i32 1)"""


def in_float32(name: str, packed: str) -> str:
    """Return LLVM text that converts a tile to float32: one register with the even elements, and one with the odd
    elements."""
    sixteen, high = filled("i32 16"), filled("i32 -65536")
    return f"""\
  %w{name} = bitcast <8 x i64> {packed} to <16 x i32>
  %l{name} = shl <16 x i32> %w{name}, {sixteen}
  %u{name} = and <16 x i32> %w{name}, {high}
  %e{name} = bitcast <16 x i32> %l{name} to <16 x float>
  %o{name}.f = bitcast <16 x i32> %u{name} to <16 x float>"""
