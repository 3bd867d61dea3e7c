"""Products in whole numbers: x in bytes with a scale for every group, codes in bytes, four of each an instruction.

    x          | scale | 16, 32 or 64 signed bytes |        a group: numbers -127 ... 127 times the scale
    begins     what lanes begin with: the codes' zero, times the bytes of x that they meet, subtracted beforehand
    codes      16, 32 or 64 neighbouring bytes, shifted and masked at once, or looked up      unsigned, `zero` too large
    totals     += (scale of x * gain of the group) * (begins + codes . bytes)                  exact but for this line

What is rounded is x itself, as `formats/activations.py` says it (lossy, a named choice); the sums of a group are whole
numbers, and the order of those over the groups is fixed by format, shape and instruction set (grade E1). Codes are met
in the order in which they lie in memory, so the bytes of x are put into that order, once for many rows of the matrix.

A CPU without an instruction for four products adds two of them in 16 bits first, where codes of more than seven bits
would be too large: such codes are signed ones, whose sign x takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from llvmlite import ir

from smoe.formats.activations import LARGEST, LEAST
from smoe.formats.base import Bits, Field, Format, Run
from smoe.kernels.builder import Code
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import BYTE, FLOAT, HALF_WORD, WORD, Value
from smoe.kernels.quantised_block import Row, arranged, group_numbers, order_of

_PIECE = 16
"""Numbers of a run that are taken together; one, two or four pieces fill a register."""
_MOST_IN_16_BITS = 128
"""The largest code of which two, times 127 each, are still a number of 16 bits."""


class _Piece(NamedTuple):
    """Numbers i ... i + 15 of a run."""

    group: int
    run: Run
    i: int
    nth: int
    """Of its group, in the order of the runs."""
    begin: int = 0
    """Bytes between the first of these blocks and this."""


class _Codes(NamedTuple):
    """What the codes of a format are as bytes."""

    zero: int
    """What they are too large by."""
    is_signed: bool = False
    """Else unsigned."""
    table: tuple[int, ...] | None = None
    """What 16 codes become, where that is looked up."""
    unit: float = 1.0
    """What one stands for: a table's numbers are multiples of it."""


def together(isa: Isa, form: Format) -> int:
    """Blocks that share a register."""
    return max(1, 4 * isa.lanes // form.numbers)


def add_block(
    code: Code,
    form: Format,
    places: Sequence[Value],
    xs: Sequence[Row],
    block: Value,
    gains: Sequence[Value],
    totals: Sequence[Value],
) -> list[Value]:
    """Totals [lanes] plus block number `block` of every row of the matrix, and those behind it that share a register
    with it, times every row of x, scaled.

    `places`: where the first block begins in each row of the matrix; `gains`: of every row of the matrix, a number for
    each group of all these blocks.
    """
    build, groups = code.build, gains[0].type.count
    registers_of = _registers(code.isa, form, groups // len(form.groups))
    found, kind = list(totals), _codes_of(code.isa, form)
    at = build.mul(block, code.number(4 * len(form.groups)))
    scales = [code.load(code.registers(FLOAT, groups), code.at(x.scales, at), 4) for x in xs]
    both = [build.fmul(gain, scale) for gain in gains for scale in scales]
    k = build.mul(block, code.number(form.numbers))
    for of, registers in groupby(enumerate(registers_of), lambda each: [piece.group for piece in each[1]]):
        lanes = _PIECE // 4 * len(of)
        sums: list[Value] = [None] * len(found)
        for n, pieces in registers:
            here = build.add(k, code.number(4 * lanes * n))
            numbers = [code.load(code.registers(BYTE, 4 * lanes), code.at(x.numbers, here)) for x in xs]
            begins = [_begin(code, kind, x, here, lanes) for x in xs]
            for row, place in enumerate(places):
                codes = _bytes(code, form, kind, pieces, place)
                for r in range(len(xs)):
                    m = row * len(xs) + r
                    before = begins[r] if sums[m] is None else build.add(sums[m], begins[r])
                    sums[m] = code.byte_dots(before, codes, numbers[r], kind.is_signed)
        where = [group for group in of for _ in range(_PIECE // 4)] * (code.isa.lanes // lanes)
        for m, total in enumerate(found):
            reals = code.filled_up(build.sitofp(sums[m], code.registers(FLOAT, lanes)))
            found[m] = code.fma(code.pick(both[m], where), reals, total)
    return found


def row_of(code: Code, form: Format, x: Value, columns: Value) -> Row:
    """A row of bf16 numbers in bytes, by the function that `arrangement` has made."""
    build = code.build
    groups = build.sdiv(columns, code.number(group_numbers(form)))
    numbers, begins = code.scratch(columns), code.scratch(columns)
    scales, sums = (code.scratch(build.mul(groups, code.number(4))) for _ in range(2))
    code.call(_arrangement_name(form), [x, numbers, begins, scales, sums, columns])
    return Row(numbers, sums, begins, scales)


def _arrangement_name(form: Format) -> str:
    return f"arrange_{form.name}"


def arrangement(module: ir.Module, isa: Isa, form: Format) -> None:
    """The function `arrange_F(x, numbers, begins, scales, sums, K)`: K bf16 numbers become

    K bytes in the order in which codes lie, K / 4 sums that lanes begin with where codes have a zero, and for every
    group its scale, and the sum of its numbers where there is a minimum.
    """
    arguments = ("*x", "*numbers", "*begins", "*scales", "*sums", "K")
    code = Code(module, isa, _arrangement_name(form), arguments)
    x, numbers, begins, scales, sums, columns = code.arguments
    build, groups = code.build, len(form.groups)
    places = {
        (piece.group, piece.nth): _PIECE * n
        for n, piece in enumerate(piece for pieces in _registers(isa, form, 1) for piece in pieces)
    }
    unit = _codes_of(isa, form).unit

    def block(b: Value, _: list[Value]) -> list[Value]:
        k = build.mul(b, code.number(form.numbers))
        for g in range(groups):
            here = code.at(x, build.mul(build.add(k, code.number(g * group_numbers(form))), code.number(2)))
            whole, scale = _in_whole_numbers(code, form, here)
            at = build.mul(build.add(build.mul(b, code.number(groups)), code.number(g)), code.number(4))
            code.store(build.fmul(scale, ir.Constant(FLOAT, unit)), code.at(scales, at))
            if form.minimum is not None:
                code.store(build.fmul(build.sitofp(_sum(code, whole), FLOAT), scale), code.at(sums, at))
            for n, register in enumerate(arranged(code, whole, order_of(form))):
                nth, inside = divmod(n * isa.lanes, _PIECE)
                place = build.add(k, code.number(places[g, nth] + inside))
                code.store(build.trunc(register, code.registers(BYTE)), code.at(numbers, place))
        return []

    code.loop(code.number(0), build.sdiv(columns, code.number(form.numbers)), 1, [], block)
    _fill_begins(code, form, numbers, begins, columns)
    code.end()


def _in_whole_numbers(code: Code, form: Format, x: Value) -> tuple[list[Value], Value]:
    """A group of x as registers of whole numbers, in its own order, and their scale.

    What is no number, or not finite, makes the scale such a number.
    """
    build, lanes = code.build, code.isa.lanes
    reals: list[Value] = []
    largest: Value = None
    for i in range(0, group_numbers(form), lanes):
        wide = code.widened(code.load(code.registers(HALF_WORD), code.at(x, 2 * i)))
        bits = build.and_(build.bitcast(wide, code.registers(WORD)), code.words([0x7FFFFFFF] * lanes))
        largest = bits if largest is None else _larger(code, largest, bits)
        reals.append(wide)
    while largest.type.count > 1:
        half = largest.type.count // 2
        largest = _larger(code, code.pick(largest, range(half)), code.pick(largest, range(half, 2 * half)))
    size = build.bitcast(build.extract_element(largest, ir.Constant(WORD, 0)), FLOAT)
    most, none = ir.Constant(FLOAT, LARGEST), ir.Constant(FLOAT, 0.0)
    is_little = build.fcmp_ordered("<", size, ir.Constant(FLOAT, LEAST))
    gain = code.splat(build.select(is_little, none, build.fdiv(most, size)))
    scale = build.select(is_little, none, build.fdiv(size, most))
    return [code.nearest(build.fmul(each, gain)) for each in reals], scale


def _larger(code: Code, a: Value, b: Value) -> Value:
    return code.build.select(code.build.icmp_unsigned(">", a, b), a, b)


def _sum(code: Code, registers: Sequence[Value]) -> Value:
    """Of all numbers of registers of whole ones."""
    total = registers[0]
    for register in registers[1:]:
        total = code.build.add(total, register)
    while total.type.count > 1:
        half = total.type.count // 2
        total = code.build.add(code.pick(total, range(half)), code.pick(total, range(half, 2 * half)))
    return code.build.extract_element(total, ir.Constant(WORD, 0))


def _fill_begins(code: Code, form: Format, numbers: Value, begins: Value, columns: Value) -> None:
    """What lanes begin with: their four bytes of x, times the codes' zero, subtracted."""
    lanes, kind = min(code.isa.lanes, form.numbers // 4), _codes_of(code.isa, form)
    if not kind.zero:
        return
    zeros, nothing = code.bytes([kind.zero] * 4 * lanes), code.words([0] * lanes)

    def register(k: Value, _: list[Value]) -> list[Value]:
        bytes_ = code.load(code.registers(BYTE, 4 * lanes), code.at(numbers, k))
        less = code.byte_dots(nothing, zeros, bytes_, False)
        code.store(code.build.sub(nothing, less), code.at(begins, k))
        return []

    code.loop(code.number(0), columns, 4 * lanes, [], register)


def _begin(code: Code, kind: _Codes, x: Row, k: Value, lanes: int) -> Value:
    if not kind.zero:
        return code.words([0] * lanes)
    return code.load(code.registers(WORD, lanes), code.at(x.begins, k))


def _codes_of(isa: Isa, form: Format) -> _Codes:
    """Signed where the CPU multiplies such as easily, else unsigned where it can multiply them so."""
    if form.table is not None:
        unit = min(abs(number) for number in form.table if number)
        whole = [round(number / unit) for number in form.table]
        assert [number * unit for number in whole] == list(form.table), form.name
        least = min(whole)
        if isa.has_signed_bytes:
            return _Codes(0, True, tuple(whole), unit)
        if max(whole) - least <= _MOST_IN_16_BITS or isa.has_int8_dots:
            return _Codes(-least, False, tuple(number - least for number in whole), unit)
        return _Codes(0, True, tuple(whole), unit)
    if form.is_signed:
        return _Codes(128) if isa.has_int8_dots and not isa.has_signed_bytes else _Codes(0, True)
    return _Codes(form.zero)


def _registers(isa: Isa, form: Format, blocks: int) -> list[list[_Piece]]:
    """The pieces of some blocks by register, so that neighbours in memory with the same shift share one.

    What lies in a register comes block by block: x is in the same order whether blocks share a register or not.
    """
    pieces = []
    for g, group in enumerate(form.groups):
        runs = [(run, i) for run in group.runs for i in range(0, run.numbers, _PIECE)]
        pieces += [_Piece(g, run, i, nth) for nth, (run, i) in enumerate(runs)]

    def place(piece: _Piece) -> tuple[int, int]:
        first = piece.run.fields[0]
        assert isinstance(first, Field)
        return first.shift, first.byte + piece.i

    pieces.sort(key=place)
    pieces = [
        piece._replace(group=piece.group + n * len(form.groups), begin=n * form.nbytes)
        for n in range(blocks)
        for piece in pieces
    ]
    count = 4 * isa.lanes // _PIECE
    return [pieces[n : n + count] for n in range(0, len(pieces), count)]


def _bytes(code: Code, form: Format, kind: _Codes, pieces: Sequence[_Piece], place: Value) -> Value:
    """The codes of all pieces, as `_Codes` says."""
    build = code.build
    total: Value = None
    for fields in zip(*(piece.run.fields for piece in pieces), strict=True):
        if isinstance(fields[0], Bits):
            part = _single_bits(code, fields, pieces, place)
        else:
            part = _fields(code, fields, pieces, place)
        total = part if total is None else build.or_(total, part)
    if kind.table is not None:
        return code.looked_up_bytes(kind.table, total)
    if form.is_signed and not kind.is_signed:
        return build.xor(total, code.bytes([kind.zero] * total.type.count))
    return total


def _fields(code: Code, fields: Sequence[Field], pieces: Sequence[_Piece], place: Value) -> Value:
    """(byte >> shift & mask) << left of each piece: one shift where all go the same way."""
    build = code.build
    raw = _neighbours(
        code, [piece.begin + field.byte + piece.i for field, piece in zip(fields, pieces, strict=True)], place
    )
    right = [field.shift - field.left for field in fields]
    masks = [field.mask for field in fields]
    if min(right) < 0 < max(right):
        raw = _moved(code, raw, [field.shift for field in fields])
        raw = build.and_(raw, code.bytes([mask for mask in masks for _ in range(_PIECE)]))
        return _moved(code, raw, [-field.left for field in fields])
    raw = _moved(code, raw, right)
    kept = [field.mask << field.left for field in fields]
    if all(mask == 255 for mask in kept):
        return raw
    return build.and_(raw, code.bytes([mask for mask in kept for _ in range(_PIECE)]))


def _moved(code: Code, raw: Value, right: Sequence[int]) -> Value:
    """Each piece shifted in words of 32 bits: what comes in from the neighbouring byte is for the caller to mask."""
    if not any(right):
        return raw
    build = code.build
    words = build.bitcast(raw, ir.VectorType(WORD, raw.type.count // 4))
    by = code.words([abs(bits) for bits in right for _ in range(_PIECE // 4)])
    return build.bitcast(build.lshr(words, by) if max(right) > 0 else build.shl(words, by), raw.type)


def _neighbours(code: Code, begins: Sequence[int], place: Value) -> Value:
    """16 bytes from each of these on, with as few loads as may be."""
    first = min(begins)
    span = max(begins) + _PIECE - first
    if span in (_PIECE, 2 * _PIECE, 4 * _PIECE) and span <= _PIECE * len(begins):
        raw = code.load(code.registers(BYTE, span), code.at(place, first))
        wanted = [begin - first + j for begin in begins for j in range(_PIECE)]
        return raw if wanted == list(range(span)) else code.pick(raw, wanted)
    half = len(begins) // 2
    parts = [_neighbours(code, part, place) for part in (begins[:half], begins[half:])]
    return code.build.shuffle_vector(*parts, code.words(range(_PIECE * len(begins))))


def _single_bits(code: Code, fields: Sequence[Bits], pieces: Sequence[_Piece], place: Value) -> Value:
    """A bit for each number; those of one block are neighbours."""
    build, count = code.build, _PIECE * len(pieces)
    word, shift = ir.Constant(ir.IntType(count), 0), 0
    for block, pairs in groupby(zip(fields, pieces, strict=True), lambda each: each[1].begin):
        begins = [bits.byte + piece.i // 8 for bits, piece in pairs]
        assert begins == [begins[0] + _PIECE // 8 * n for n in range(len(begins))], begins
        part = code.load(ir.IntType(_PIECE * len(begins)), code.at(place, block + begins[0]))
        part = build.zext(part, word.type) if len(begins) < len(pieces) else part
        word = build.or_(word, build.shl(part, ir.Constant(word.type, shift))) if shift else part
        shift += _PIECE * len(begins)
    return code.where_set(word, code.bytes([1 << fields[0].left] * count), code.bytes([0] * count))
