"""Pieces of LLVM text for registers: constants, copies of a number, conversions, transpositions."""

from __future__ import annotations

import struct
from collections.abc import Iterable


def joined(parts: Iterable[str]) -> str:
    """Return lines of text, one below the other."""
    return "\n".join(parts)


def filled(element: str, lanes: int = 16) -> str:
    """Return a constant register with `lanes` copies of `element`, as LLVM text."""
    return "<" + ", ".join([element] * lanes) + ">"


def constant(value: float) -> str:
    """Return a constant register with 16 copies of a float32, as LLVM text."""
    return filled(f"float {single(value)}")


def single(value: float) -> str:
    """Return a float32 constant as LLVM writes it: as the bits of the float64 that has the same value."""
    (single,) = struct.unpack("f", struct.pack("f", value))
    return f"0x{struct.pack('>d', single).hex().upper()}"


def from_bits(bits: int) -> float:
    """Return the float32 number that has the bits of an integer."""
    value: float = struct.unpack("f", struct.pack("I", bits))[0]
    return value


def broadcast(name: str, value: str, kind: str = "float") -> str:
    """Return LLVM text for `%name.all`, a register with 16 copies of a number."""
    return f"""\
  %{name}.one = insertelement <16 x {kind}> poison, {kind} {value}, i64 0
  %{name}.all = shufflevector <16 x {kind}> %{name}.one, <16 x {kind}> poison, <16 x i32> zeroinitializer"""


def rounded(to: str, bits: str, kind: str = "<16 x i32>") -> str:
    """Return LLVM text that rounds float32 bits to bf16, ties to even. The lower half of the bits becomes zero."""

    def constant(value: int) -> str:
        return filled(f"i32 {value}") if kind.startswith("<") else str(value)

    return f"""\
  %{to}.high = lshr {kind} {bits}, {constant(16)}
  %{to}.odd = and {kind} %{to}.high, {constant(1)}
  %{to}.half = add {kind} %{to}.odd, {constant(0x7FFF)}
  %{to}.up = add {kind} {bits}, %{to}.half
  %{to} = and {kind} %{to}.up, {constant(-65536)}"""


def widened(bits: str, result: str, lanes: int) -> str:
    """Return LLVM text that converts bf16 numbers, given as 16 bits each, to float32."""
    half, whole, real = _typed("i16", lanes), _typed("i32", lanes), _typed("float", lanes)
    return f"""\
  %{bits}.wide = zext {half} %{bits} to {whole}
  %{bits}.high = shl {whole} %{bits}.wide, {_whole(16, lanes)}
  %{result} = bitcast {whole} %{bits}.high to {real}"""


def as_bf16(number: str, result: str, lanes: int) -> str:
    """Return LLVM text that rounds a float32 to bf16 and leaves it as a float32. Every NaN becomes the same NaN."""
    whole, real, flag = (_typed(kind, lanes) for kind in ("i32", "float", "i1"))
    return f"""\
  %{number}.bits = bitcast {real} %{number} to {whole}
{rounded(f"{number}.near", f"%{number}.bits", whole)}
  %{number}.is.nan = fcmp uno {real} %{number}, %{number}
  %{number}.safe = select {flag} %{number}.is.nan, {whole} {_whole(0x7FC00000, lanes)}, {whole} %{number}.near
  %{result} = bitcast {whole} %{number}.safe to {real}"""


def halved(number: str, result: str, lanes: int) -> str:
    """Return LLVM text that converts a float32, whose value is exact in bf16, to the 16 bits of bf16."""
    half, whole, real = _typed("i16", lanes), _typed("i32", lanes), _typed("float", lanes)
    return f"""\
  %{result}.bits = bitcast {real} %{number} to {whole}
  %{result}.low = lshr {whole} %{result}.bits, {_whole(16, lanes)}
  %{result} = trunc {whole} %{result}.low to {half}"""


def _typed(kind: str, lanes: int) -> str:
    return kind if lanes == 1 else f"<{lanes} x {kind}>"


def _whole(value: int, lanes: int) -> str:
    return str(value) if lanes == 1 else filled(f"i32 {value}", lanes)


def transposed(rows: list[str], element: str) -> tuple[list[str], list[str]]:
    """Return LLVM text that transposes n registers of n numbers, and the names of the result's registers.

    It consists of rounds of shuffles. Round s exchanges bit s of a register's number with bit s of the lane's number.
    """
    lines, names, width = [], list(rows), len(rows)
    for bit in (2**n for n in range(width.bit_length() - 1)):
        for low in (i for i in range(width) if not i & bit):
            high = low | bit
            a, b = names[low], names[high]
            names[low], names[high] = f"%t{bit}.{low}", f"%t{bit}.{high}"
            first = [n + width - bit if n & bit else n for n in range(width)]
            second = [n + width if n & bit else n + bit for n in range(width)]
            lines += [_shuffle(names[low], a, b, first, element), _shuffle(names[high], a, b, second, element)]
    return lines, names


def _shuffle(to: str, a: str, b: str, lanes: list[int], element: str) -> str:
    """Return LLVM text for a shuffle that takes `lanes` of two registers. The lanes of `b` are counted after those of
    `a`."""
    kind, mask = f"<{len(lanes)} x {element}>", ", ".join(f"i32 {lane}" for lane in lanes)
    return f"  {to} = shufflevector {kind} {a}, {kind} {b}, <{len(lanes)} x i32> <{mask}>"
