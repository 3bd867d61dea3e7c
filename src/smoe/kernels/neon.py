"""Operations that need special instructions on aarch64: NEON, and dot products of four bytes where the CPU has them.

A NEON register holds four float32 numbers. Here two registers count as one of eight, so that bytes are loaded eight at
a time, and 32 registers hold as much as the 16 of AVX2. Each operation is applied to one register after the other.

    16 bytes of codes, and of x     sdot           adds four products to each lane (FEAT_DotProd)
                                    smull, addp    products in 16 bits, added in pairs; these added in pairs in 32 bits
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llvmlite import ir

from smoe.kernels.kinds import BYTE, FLOAT, HALF_WORD, LONG, WORD, Value

if TYPE_CHECKING:
    from smoe.kernels.builder import Code

_BITS = 128
"""The number of bits of a register."""
_BYTES, _WORDS = ir.VectorType(BYTE, _BITS // 8), ir.VectorType(WORD, _BITS // 32)
_PLACE_OF_ONE, _PLACE_OF_NONE = 0x02020000, 0x0100FFFF
"""Indices of the four bytes of a float32 in a table of upper halves. The indices of its lower half are out of range,
which yields 0."""


def looked_up_bytes(code: Code, table: Sequence[int], codes: Value) -> Value:
    whole, looks = code.bytes(table), ir.FunctionType(_BYTES, [_BYTES] * 2)
    return _by_register(code, lambda some: code.intrinsic("llvm.aarch64.neon.tbl1.v16i8", looks, [whole, some]), codes)


def looked_up(code: Code, table: Sequence[float], codes: Value) -> Value:
    build, lanes, looks = code.build, codes.type.count, ir.FunctionType(_BYTES, [_BYTES] * 3)
    bits = struct.pack(f"<{len(table)}f", *table)
    assert not any(bits[0::4]) and not any(bits[1::4]), f"not exact in bf16: {table}"
    upper = [byte for n in range(2, len(bits), 4) for byte in bits[n : n + 2]]
    halves = [code.bytes(upper[:16]), code.bytes(upper[16:])]
    lowest = build.and_(codes, code.words([15] * lanes))
    places = build.mul(lowest, code.words([_PLACE_OF_ONE] * lanes))

    def look(some: Value) -> Value:
        found = code.intrinsic("llvm.aarch64.neon.tbl2.v16i8", looks, [*halves, build.bitcast(some, _BYTES)])
        return build.bitcast(found, ir.VectorType(FLOAT, some.type.count))

    return _by_register(code, look, build.add(places, code.words([_PLACE_OF_NONE] * lanes)))


def gathered(code: Code, table: Value, places: Value, width: int) -> Value:
    """Return the entries of the table at the address `table` whose indices are `places`, each `width` bytes. They are
    loaded one after the other, because NEON has no gather instruction."""
    build, addresses = code.build, []
    for n in range(places.type.count):
        place = build.zext(build.extract_element(places, ir.Constant(WORD, n)), LONG)
        addresses.append(code.at(table, build.mul(place, code.number(width))))
    return code.loaded_each(ir.IntType(8 * width), addresses)


def where_set(code: Code, word: Value, numbers: Value, others: Value) -> Value:
    """Return numbers from two registers, selected by the bits of `word`: a set bit selects from `numbers`, a clear bit
    from `others`. Each lane tests its bit in a copied byte, because LLVM would extract one bit after the other."""
    build, kind, count = code.build, numbers.type, numbers.type.count
    if kind.element == WORD:
        bits, own = code.splat(build.zext(word, WORD), count), code.words([1 << n for n in range(count)])
    else:
        assert kind.element == BYTE and count in (16, 32), kind
        four = code.splat(word if count == 32 else build.zext(word, WORD), count // 4)
        bits = code.pick(build.bitcast(four, kind), [n // 16 * 16 + n // 8 for n in range(count)])
        own = code.bytes([1 << n % 8 for n in range(count)])
    return build.select(build.icmp_unsigned("!=", build.and_(bits, own), ir.Constant(kind, None)), numbers, others)


def byte_dots(code: Code, total: Value, codes: Value, x: Value, is_signed: bool) -> Value:
    """Return `total` plus dot products of four bytes. Unsigned codes are at most 127 here, so `is_signed` makes no
    difference."""
    four = _four_at_once if code.isa.has_int8_dots else _two_at_once
    return _by_register(code, lambda *some: four(code, *some), total, codes, x)


class DotSum:
    """An accumulator of dot products of four bytes, always in 32 bits."""

    def __init__(self, code: Code, most: int, is_signed: bool) -> None:
        self._code = code
        self._is_signed = is_signed
        self._total: Value = ir.Constant(code.registers(WORD), None)

    def add(self, codes: Value, x: Value) -> None:
        """Add a dot product of four bytes of codes and four bytes of x to the sum in every lane."""
        self._total = byte_dots(self._code, self._total, codes, x, self._is_signed)

    def pin(self) -> None:
        """Make LLVM compute the sum of the products added until now before the following instructions
        (`Code.pinned`)."""
        self._total = self._code.pinned(self._total)

    def total(self) -> Value:
        """Return the sums of all added dot products, int32 [n]."""
        return self._total


def _four_at_once(code: Code, total: Value, codes: Value, x: Value) -> Value:
    kind = ir.FunctionType(_WORDS, [_WORDS, _BYTES, _BYTES])
    return code.intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", kind, [total, codes, x])


def _two_at_once(code: Code, total: Value, codes: Value, x: Value) -> Value:
    some, halves = ir.VectorType(BYTE, 8), ir.VectorType(HALF_WORD, 8)
    multiplies, adds = (ir.FunctionType(halves, [kind] * 2) for kind in (some, halves))
    products = [
        code.intrinsic("llvm.aarch64.neon.smull.v8i16", multiplies, [code.pick(each, part) for each in (codes, x)])
        for part in (range(8), range(8, 16))
    ]
    twos = code.intrinsic("llvm.aarch64.neon.addp.v8i16", adds, products)
    fours = code.intrinsic("llvm.aarch64.neon.saddlp.v4i32.v8i16", ir.FunctionType(_WORDS, [halves]), [twos])
    return code.build.add(total, fours)


def pinned(code: Code, register: Value) -> Value:
    def one(some: Value) -> Value:
        kind = ir.FunctionType(some.type, [some.type])
        return code.build.call(ir.InlineAsm(kind, "", "=w,0", side_effect=True), [some])

    return _by_register(code, one, register)


def nearest(code: Code, reals: Value) -> Value:
    """Return float32 numbers rounded to int32. Large numbers become the largest integer, and NaN becomes zero."""
    kind, name = ir.FunctionType(_WORDS, [ir.VectorType(FLOAT, 4)]), "llvm.aarch64.neon.fcvtns.v4i32.v4f32"
    return _by_register(code, lambda some: code.intrinsic(name, kind, [some]), reals)


def _by_register(code: Code, function: Callable[..., Value], *values: Value) -> Value:
    """Return the result of `function`, which is applied to one hardware register after the other. Each of `values`
    consists of one or more hardware registers."""
    parts = values[0].type.count * _width(values[0]) // _BITS
    if parts == 1:
        return function(*values)
    found = []
    for n in range(parts):
        sizes = [value.type.count // parts for value in values]
        some = [code.pick(value, range(size * n, size * (n + 1))) for value, size in zip(values, sizes, strict=True)]
        found.append(function(*some))
    return code.joined(found)


def _width(value: Value) -> int:
    """Return the size in bits of each number in a register."""
    return 32 if value.type.element == FLOAT else int(value.type.element.width)
