"""Multiplies codes with x as pairs of bf16 numbers, on CPUs with bf16 dot products.

    codes of 16 or 32 neighbouring bytes -> 16 bits each -> bf16 -> total += code . x        32 products per instruction

A code of up to seven bits becomes a bf16 number in one operation: 128 + code is 0x4300 | code. The 128 is subtracted
once per block, together with the format's own zero, by way of the sums of x. For formats with a table, values are
looked up in a register; so are 4-bit codes if nothing else must be subtracted. This takes a third of the instructions
of converting each code to 32 bits and to float32 before multiplying it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from llvmlite import ir

from smoe.formats.base import Bits, Field, Format, Points, Run
from smoe.kernels.builder import Code
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import BYTE, HALF_WORD, Value

SHIFT = 128
_PIECE = 16
"""The number of elements of a run that are converted together, a piece. Two pieces fill a register."""


class _Piece(NamedTuple):
    """Sixteen elements of a run, from element `i` to `i` + 15, whose codes are converted together."""

    group: int
    run: Run
    i: int


def fits(isa: Isa, form: Format) -> bool:
    """Return whether the codes of a format can become bf16 numbers exactly, and the CPU has bf16 dot products."""
    is_other = form.is_signed or form.is_float8 or form.reals or form.grid is not None
    return isa.has_bf16_dots and not is_other and form.most < SHIFT


def subtracted(isa: Isa, form: Format) -> int:
    """Return the number that must be subtracted from converted codes. It includes the format's own zero."""
    if not fits(isa, form):
        return form.zero
    return 0 if _table_of(form) is not None else form.zero + SHIFT


def _table_of(form: Format) -> tuple[float, ...] | None:
    """Return the values of the 16 codes if the product looks values up in a table and subtracts nothing from them; else
    None."""
    if form.table is not None or form.minimum is not None:
        return form.table
    fields = [field for group in form.groups for run in group.runs for field in run.fields]
    has_four_bits = all(isinstance(field, Field) and field.mask == 15 and not field.left for field in fields)
    return tuple(float(code - form.zero) for code in range(16)) if has_four_bits else None


def add_block(
    code: Code,
    form: Format,
    places: Sequence[Value],
    xs: Sequence[Value],
    gains: Sequence[Value],
    totals: Sequence[Value],
) -> list[Value]:
    """Return `totals` [16 floats each] plus the scaled products of one block, for every row of the matrix and every row
    of x.

    `places`: the addresses of the block in the rows of the matrix. `xs`: the addresses of the block's elements in the
    rows of x, in the order of runs. `gains`: for every row of the matrix, a register with one number per group.
    """
    found, at = list(totals), 0
    for (first, second), pairs in groupby(_pairs(form), lambda pair: (pair[0].group, pair[1].group)):
        sums = [code.reals(0.0)] * len(found)
        for one, other in pairs:
            numbers = [code.load(ir.VectorType(HALF_WORD, 2 * _PIECE), code.at(x, 2 * at), 2) for x in xs]
            at += 2 * _PIECE
            for row, place in enumerate(places):
                codes = _as_bf16(code, form, one, other, place)
                for r, x in enumerate(numbers):
                    n = row * len(xs) + r
                    sums[n] = code.dots(sums[n], codes, x)
        for n in range(len(found)):
            lanes = [first] * (_PIECE // 2) + [second] * (_PIECE // 2)
            found[n] = code.fma(code.pick(gains[n // len(xs)], lanes), sums[n], found[n])
    return found


def _pairs(form: Format) -> Iterator[tuple[_Piece, _Piece]]:
    pieces = [
        _Piece(g, run, i)
        for g, group in enumerate(form.groups)
        for run in group.runs
        for i in range(0, run.numbers, _PIECE)
    ]
    return iter(list(zip(pieces[::2], pieces[1::2], strict=True)))


def _as_bf16(code: Code, form: Format, one: _Piece, other: _Piece, place: Value) -> Value:
    """Return the codes of two pieces, 32 elements, as bf16 numbers (16 bits each). `SHIFT` has been added to each code;
    for formats with a table, the result is the codes' values in the table."""
    build, total, table = code.build, None, _table_of(form)
    for field, second in zip(one.run.fields, other.run.fields, strict=True):
        assert not isinstance(field, Points)
        if isinstance(field, Bits):
            assert isinstance(second, Bits)
            part, left = _single_bits(code, field, one, second, other, place), 0
        else:
            assert isinstance(second, Field) and field.left == second.left
            part = _bytes(code, field, one, second, other, place)
            if table is None:
                part = build.and_(part, code.halves([field.mask] * _PIECE + [second.mask] * _PIECE))
            left = field.left
        part = build.shl(part, code.halves([left] * 2 * _PIECE)) if left else part
        total = part if total is None else build.or_(total, part)
    if table is not None:
        return code.looked_up_halves([_bf16_bits(number) for number in table], total)
    return build.or_(total, code.halves([0x4300] * 2 * _PIECE))


def _bytes(code: Code, field: Field, one: _Piece, second: Field, other: _Piece, place: Value) -> Value:
    """Return the bytes that contain one field of two pieces, as 16 bits each, shifted so that the field begins at bit
    0."""
    build = code.build
    begins, follows = field.byte + one.i, second.byte + other.i
    if (follows, second.shift) == (begins + _PIECE, field.shift):
        raw = build.zext(
            code.load(ir.VectorType(BYTE, 2 * _PIECE), code.at(place, begins)), ir.VectorType(HALF_WORD, 2 * _PIECE)
        )
        return build.lshr(raw, code.halves([field.shift] * 2 * _PIECE)) if field.shift else raw
    if follows == begins:
        raw = code.load(ir.VectorType(BYTE, _PIECE), code.at(place, begins))
        wide = code.pick(build.zext(raw, ir.VectorType(HALF_WORD, _PIECE)), [*range(_PIECE), *range(_PIECE)])
        return build.lshr(wide, code.halves([field.shift] * _PIECE + [second.shift] * _PIECE))
    halves = []
    for begin, shift in ((begins, field.shift), (follows, second.shift)):
        raw = code.load(ir.VectorType(BYTE, _PIECE), code.at(place, begin))
        wide = build.zext(raw, ir.VectorType(HALF_WORD, _PIECE))
        halves.append(build.lshr(wide, code.halves([shift] * _PIECE)) if shift else wide)
    return build.shuffle_vector(*halves, code.words(range(2 * _PIECE)))


def _single_bits(code: Code, bits: Bits, one: _Piece, second: Bits, other: _Piece, place: Value) -> Value:
    """Return one bit of the code of each element of two pieces, shifted to the bit's position in the code."""
    build, size = code.build, _PIECE // 8
    begins, follows = bits.byte + one.i // 8, second.byte + other.i // 8
    if follows == begins + size:
        word = code.load(ir.IntType(2 * _PIECE), code.at(place, begins))
    else:
        both = ir.IntType(2 * _PIECE)
        parts = [build.zext(code.load(ir.IntType(_PIECE), code.at(place, byte)), both) for byte in (begins, follows)]
        word = build.or_(parts[0], build.shl(parts[1], ir.Constant(both, _PIECE)))
    return code.where_set(word, code.halves([1 << bits.left] * 2 * _PIECE), code.halves([0] * 2 * _PIECE))


def _bf16_bits(number: float) -> int:
    """Return the 16 bits of the bf16 number `number`, which must be exact in bf16."""
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    assert bits & 0xFFFF == 0, number
    return bits >> 16
