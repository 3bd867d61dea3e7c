"""Loads blocks of several rows of a quantized matrix so that each register has the same four bytes of every row.

    row 0    | 16 bytes |            register 0     | bytes 0-3 of row 0 | bytes 0-3 of row 1 | ...
    row 1    | 16 bytes |     ->     register 1     | bytes 4-7 of row 0 | bytes 4-7 of row 1 | ...
    ...                              ...

One instruction then applies a shift, a mask or a look-up to all rows, and a scale is a register with one number per
row. Sums over a row need no additions across a register.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from smoe.formats.base import Bits, Field, Format, Group, Points, Scalar
from smoe.formats.interleaved import WORD_BYTES, words_of
from smoe.kernels.builder import Code
from smoe.kernels.isa import Isa
from smoe.kernels.jit import cpu_has
from smoe.kernels.kinds import BYTE, FLOAT, HALF, HALF_WORD, LONG, WORD, Value
from smoe.kernels.quantised_block import float8

PIECE = 16
"""The number of bytes of each row that are transposed at a time."""
_ODD = tuple(128 * (code.bit_count() % 2) for code in range(16))
"""A table with an entry for each value of four bits. Bit 7 of the entry is set if an odd number of the four bits is
set."""
_PERMUTES = "avx512vbmi"
_SPREAD = 0x00204081
"""A factor that moves bit n of a 4-bit number to the lowest bit of byte n."""


def is_in_planes(isa: Isa, form: Format) -> bool:
    """Return whether the points of a format's grid (a codebook of short vectors) are looked up one component at a time,
    so that a register has one component of many points.

    CPUs that can permute the bytes of two registers do this in a sixth of the time of loads.
    """
    has_permutes = isa.has_int8_dots and isa.lanes == 16 and cpu_has(_PERMUTES)
    return has_permutes and form.grid is not None and form.grid.width == PIECE // 4


class Columns:
    """One quantized block of each of several rows of a matrix (as many rows as a register has lanes), loaded as columns
    of four bytes."""

    def __init__(self, code: Code, form: Format, places: Sequence[Value], zero: int = 0) -> None:
        """`places`: for each row of the matrix, the address of the row's block. `zero`: a constant that is added to
        elements of grid points."""
        self._code = code
        self._form = form
        self._places = places
        self._zero = zero
        self._known: dict[int, list[Value]] = {}

    def words(self, byte: int) -> list[Value]:
        """Return the bytes from `byte` to `byte` + 15 of every row, as four registers int32 [lanes]."""
        if byte not in self._known:
            self._known[byte] = self._transposed(byte)
        return self._known[byte]

    def byte(self, byte: int) -> Value:
        """Return byte number `byte` of every row, as int32 [lanes]."""
        return self._whole((Field(byte),))

    def codes(self, fields: Sequence[Field | Bits | Points], i: int) -> list[Value]:
        """Return the codes (quantized numbers) of the elements i to i + 15 of a run, as four registers [4 * lanes] with
        one code in each byte.

        A 32-bit word contains the codes of four neighbouring elements. With `is_in_planes`, it contains those of the
        elements i, i + 4, i + 8 and i + 12.
        """
        build, found = self._code.build, [None] * 4
        for field in fields:
            if isinstance(field, Points):
                return (self._in_planes if is_in_planes(self._code.isa, self._form) else self._of_points)(field)
            parts = self._bits(field, i) if isinstance(field, Bits) else self._field(field, i)
            found = [
                part if so_far is None else build.or_(so_far, part) for so_far, part in zip(found, parts, strict=True)
            ]
        kind = ir.VectorType(BYTE, 4 * self._code.isa.lanes)
        return [build.bitcast(each, kind) for each in found]

    def scalar(self, scalar: Scalar) -> Value:
        """Return a scalar of every row's block, such as its scale, as float32 [lanes]."""
        code, build = self._code, self._code.build
        if scalar.kind == "E8M0":
            return self._power(self.byte(scalar.byte))
        in_place = tuple(Field(scalar.byte + n, left=8 * n) for n in range(scalar.nbytes))
        bits = self._whole(scalar.fields or in_place)
        if scalar.kind == "F32":
            number = build.bitcast(bits, code.registers(FLOAT))
        else:
            halves = build.bitcast(build.trunc(bits, code.registers(HALF_WORD)), code.registers(HALF))
            number = build.fpext(halves, code.registers(FLOAT))
        return code.times(number, scalar.factor)

    def gain(self, group: Group, scale: Value) -> Value:
        """Return the factor by which the codes of a group are multiplied, for every row, as float32 [lanes]. `group`:
        elements of a block that share a scale. `scale`: the scales of the rows' blocks."""
        code, build, form = self._code, self._code.build, self._form
        if not group.scale:
            return scale
        whole = self._whole(group.scale)
        if form.has_float8_scales:
            return build.fmul(float8(code, build.trunc(whole, code.registers(BYTE))), scale)
        if form.has_signed_scales:
            by = code.words([24] * code.isa.lanes)
            whole = build.ashr(build.shl(whole, by), by)
        elif form.scale_zero:
            whole = build.sub(whole, code.words([form.scale_zero] * code.isa.lanes))
        return build.fmul(build.sitofp(whole, code.registers(FLOAT)), scale)

    def offset(self, group: Group, minimum: Value) -> Value:
        """Return the number that is subtracted from every element of a group, for every row, as float32 [lanes].
        `group`: elements of a block that share a scale. `minimum`: the minima of the rows' blocks."""
        if not group.minimum:
            return minimum
        whole = self._whole(group.minimum)
        return self._code.build.fmul(self._code.build.sitofp(whole, self._code.registers(FLOAT)), minimum)

    def _whole(self, fields: Sequence[Field]) -> Value:
        """Return one code for every row, assembled from one or more bit fields of the row's block, as int32 [lanes]."""
        code, build, lanes = self._code, self._code.build, self._code.isa.lanes
        total = None
        for piece in self._pieces_of(fields):
            part, inside = self._word_with(piece)
            part = build.lshr(part, code.words([inside] * lanes))
            part = build.shl(build.and_(part, code.words([piece.mask] * lanes)), code.words([piece.left] * lanes))
            total = part if total is None else build.or_(total, part)
        return total

    def _pieces_of(self, fields: Sequence[Field]) -> Sequence[Field]:
        """Return the bit fields of a code, each in one word (`_word_with`)."""
        return _in_one_piece(fields)

    def _word_with(self, piece: Field) -> tuple[Value, int]:
        """Return the 32-bit words of every row that contain the bit field `piece`, and the number of the field's first
        bit in the words."""
        last = _last_byte(piece)

        def holds(first: int) -> bool:
            begin, end = piece.byte - first, last - first
            return begin >= 0 and end < PIECE and begin // 4 == end // 4

        known = [first for first in self._known if holds(first)]
        first = (known or [min(piece.byte, self._form.nbytes - PIECE)])[0]
        if not holds(first):
            first = last - PIECE + 1
        word, inside = divmod(piece.byte - first, 4)
        return self.words(first)[word], 8 * inside + piece.shift

    def _field(self, field: Field, i: int) -> list[Value]:
        """Return (byte >> shift & mask) << left for 16 bytes of every row, where shift, mask and left are those of
        `field`. Bits that come from a neighbouring byte are masked out."""
        code, build, lanes = self._code, self._code.build, self._code.isa.lanes
        right, mask = field.shift - field.left, field.mask << field.left
        parts = self.words(field.byte + i)
        if right:
            by = code.words([abs(right)] * lanes)
            parts = [build.lshr(part, by) if right > 0 else build.shl(part, by) for part in parts]
        return parts if mask == 255 else [build.and_(part, code.words([mask * 0x01010101] * lanes)) for part in parts]

    def _bits(self, bits: Bits, i: int) -> list[Value]:
        """Return one bit for each of 16 elements, with four elements in each of four registers."""
        code, build, lanes = self._code, self._code.build, self._code.isa.lanes
        found = []
        for n in range(4):
            byte = self.byte(bits.byte + (i + 4 * n) // 8)
            four = build.lshr(byte, code.words([4] * lanes)) if n % 2 else build.and_(byte, code.words([15] * lanes))
            spread = build.mul(four, code.words([_SPREAD << bits.left] * lanes))
            found.append(build.and_(spread, code.words([0x01010101 << bits.left] * lanes)))
        return found

    def _of_points(self, points: Points) -> list[Value]:
        """Return all elements of a run that is stored as indices of grid points (a codebook of short vectors), with
        their signs applied, plus `zero`."""
        code, grid, zero, found = self._code, points.grid, self._zero, list[Value]()
        build, lanes = code.build, code.isa.lanes
        data = (grid.points.astype(np.int16) + zero).astype(np.uint8).tobytes()
        table = code.constant(f"{grid.name}_from_{zero}", data)
        for index in points.indices:
            words = grid.width // 4
            entries = build.bitcast(self._entries(table, index, grid.width), code.registers(WORD, words * lanes))
            found += [code.pick(entries, range(n, words * lanes, words)) for n in range(words)]
        kind = code.registers(BYTE, 4 * code.isa.lanes)
        numbers = [code.build.bitcast(each, kind) for each in found]
        if not points.signs:
            return numbers
        signs = self._signs(points)
        places = [range(4 * n, 4 * n + 4) for n in range(4)]
        return [self._signed(number, signs, numbers_of) for number, numbers_of in zip(numbers, places, strict=True)]

    def _in_planes(self, points: Points) -> list[Value]:
        """Return the elements that `_of_points` returns, computed one component of all grid points at a time."""
        code, build, lanes, grid = self._code, self._code.build, self._code.isa.lanes, points.grid
        bytes_ = [index[0]._replace(left=8 * n) for n, index in enumerate(points.indices)]
        places = build.bitcast(self._whole(bytes_), code.registers(BYTE, 4 * lanes))
        halves = [build.icmp_signed("<", places, ir.Constant(places.type, None))]
        ninth = [
            field._replace(left=field.left - 8 + n) for n, index in enumerate(points.indices) for field in index[1:]
        ]
        if ninth:
            bits = build.bitcast(self._whole(ninth), places.type)
            halves.append(self._are_set(bits, [(0, n) for n in range(4)]))
        signs, found = self._signs(points), []
        for n in range(grid.width):
            table = (grid.points[:, n].astype(np.int16) + self._zero).tolist()
            parts = [code.picked_bytes(table[i : i + 128], places) for i in range(0, len(table), 128)]
            for half in halves:
                parts = [build.select(half, b, a) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            found.append(self._signed(parts[0], signs, range(n, PIECE, grid.width)))
        return found

    def _are_set(self, bytes_: Value, bits: Sequence[tuple[int, int]]) -> Value:
        """Return, for four elements of every row, whether a bit of the row's word is set. `bits`: (byte, bit) for each
        of the four elements."""
        code, build, count = self._code, self._code.build, bytes_.type.count
        copies = code.pick(bytes_, [i // 4 * 4 + bits[i % 4][0] for i in range(count)])
        masked = build.and_(copies, code.bytes([1 << bits[i % 4][1] for i in range(count)]))
        return build.icmp_unsigned("!=", masked, ir.Constant(bytes_.type, None))

    def _entries(self, table: Value, index: Sequence[Field], width: int) -> Value:
        """Return for every row one entry of a table, which is `width` bytes wide."""
        code, build = self._code, self._code.build
        first, *more = index
        if more or first.mask != 255:
            return code.gathered(table, self._whole(index), width)
        # for one-byte indices, single loads take a quarter less time than a gather on AVX2
        bytes_ = [build.zext(code.load(BYTE, place), LONG) for place in self._places_of(first.byte)]
        addresses = [code.at(table, build.mul(each, code.number(width))) for each in bytes_]
        return code.loaded_each(ir.IntType(8 * width), addresses)

    def _signs(self, points: Points) -> Value:
        """Return the sign bits of a run of grid points, in bytes 0 and 1 of every row's word: [4 * lanes]."""
        code, build, lanes = self._code, self._code.build, self._code.isa.lanes
        first, second = points.signs
        words = self._whole((*first, *(field._replace(left=field.left + 8) for field in second)))
        signs = build.bitcast(words, code.registers(BYTE, 4 * lanes))
        if not points.has_even_signs:
            return signs
        four = code.words([0x0F0F0F0F] * lanes)
        halves = [build.and_(each, four) for each in (words, build.lshr(words, code.words([4] * lanes)))]
        odd = [code.looked_up_bytes(_ODD, build.bitcast(each, signs.type)) for each in halves]
        return build.or_(signs, build.xor(*odd))

    def _signed(self, numbers: Value, signs: Value, places: Sequence[int]) -> Value:
        """Return four elements of every row after applying their signs. The elements have `zero` added: a negative one,
        number + zero, becomes zero - number."""
        build = self._code.build
        is_negative = self._are_set(signs, [(n // 8, n % 8) for n in places])
        twice = self._code.bytes([2 * self._zero] * numbers.type.count)
        return build.select(is_negative, build.sub(twice, numbers), numbers)

    def _places_of(self, byte: int) -> list[Value]:
        """Return the address of byte number `byte` of every row's block."""
        return [self._code.at(place, byte) for place in self._places]

    def _power(self, exponent: Value) -> Value:
        """Return 2 ** (exponent - 127) as float32 [lanes], for exponents given as int32 [lanes]."""
        code, build, lanes = self._code, self._code.build, self._code.isa.lanes
        bits = build.shl(exponent, code.words([23] * lanes))
        is_least = build.icmp_unsigned("==", bits, code.words([0] * lanes))
        # 2 ** -127 is subnormal: its only set bit belongs to the mantissa
        return build.bitcast(build.select(is_least, code.words([1 << 22] * lanes), bits), code.registers(FLOAT))

    def _transposed(self, byte: int) -> list[Value]:
        """Return 16 bytes of every row as four registers, by 4 x 4 transpositions of words."""
        code, build, lanes = self._code, self._code.build, self._code.isa.lanes
        rows = [code.load(code.registers(WORD, 4), code.at(place, byte)) for place in self._places]
        four = [self._joined(rows[n::4]) for n in range(4)]  # rows n, n + 4, n + 8, ... concatenated

        def interleaved(a: Value, b: Value, picks: Sequence[int]) -> Value:
            """Return a register that has the words `picks` in every quarter, where 0 to 3 are words of `a` and 4 to 7
            words of `b`."""
            order = [4 * quarter + n % 4 + n // 4 * lanes for quarter in range(lanes // 4) for n in picks]
            return build.shuffle_vector(a, b, code.words(order))

        low, high = (0, 4, 1, 5), (2, 6, 3, 7)
        first, second = (0, 1, 4, 5), (2, 3, 6, 7)
        ab, cd = (four[0], four[1]), (four[2], four[3])
        found = []
        for half in (low, high):
            one, other = interleaved(*ab, half), interleaved(*cd, half)
            found += [interleaved(one, other, first), interleaved(one, other, second)]
        return found

    def _joined(self, rows: Sequence[Value]) -> Value:
        """Return one register with the contents of registers of four words, one register after the other."""
        registers = list(rows)
        while len(registers) > 1:
            registers = [self._code.joined(registers[n : n + 2]) for n in range(0, len(registers), 2)]
        return registers[0]


class InterleavedColumns(Columns):
    """Blocks that are interleaved in memory (`formats/interleaved.py`), so columns are loaded as they are."""

    def __init__(self, code: Code, form: Format, place: Value, zero: int = 0) -> None:
        """`place`: the address of the interleaved blocks of all rows."""
        super().__init__(code, form, [place], zero)
        layout = words_of(form)
        assert layout is not None and form.rows == code.isa.lanes, form.name
        self._layout = layout

    def words(self, byte: int) -> list[Value]:
        first, odd = divmod(byte - self._layout.begin, WORD_BYTES)
        assert not odd, (self._form.name, byte)
        return [self._word(first + n) for n in range(PIECE // WORD_BYTES)]

    def _word(self, n: int) -> Value:
        """Return word number `n` of every row, int32 [lanes]."""
        code, lanes = self._code, self._code.isa.lanes
        return code.load(code.registers(WORD), code.at(self._places[0], WORD_BYTES * lanes * n))

    def _pieces_of(self, fields: Sequence[Field]) -> Sequence[Field]:
        pieces = _in_one_piece(fields)
        is_inside = all(self._layout.word_of(each.byte) == self._layout.word_of(_last_byte(each)) for each in pieces)
        return pieces if is_inside else [each._replace(mask=each.mask & 255 >> each.shift) for each in fields]

    def _word_with(self, piece: Field) -> tuple[Value, int]:
        layout, n = self._layout, self._layout.word_of(piece.byte)
        if n < 0:
            return self._others(), 8 * (piece.byte - layout.others) + piece.shift
        return self._word(n), 8 * (piece.byte - layout.begin - WORD_BYTES * n) + piece.shift

    def _others(self) -> Value:
        """Return the bytes of every row that are in no word, int32 [lanes]."""
        code, lanes, layout = self._code, self._code.isa.lanes, self._layout
        kind = ir.IntType(8 * layout.other_bytes)
        place = code.at(self._places[0], WORD_BYTES * lanes * layout.number)
        return code.build.zext(code.load(code.registers(kind), place), code.registers(WORD))

    def _places_of(self, byte: int) -> list[Value]:
        layout, lanes, n = self._layout, self._code.isa.lanes, self._layout.word_of(byte)
        begin, step = WORD_BYTES * lanes * n + byte - layout.begin - WORD_BYTES * n, WORD_BYTES
        if n < 0:
            begin, step = WORD_BYTES * lanes * layout.number + byte - layout.others, layout.other_bytes
        return [self._code.at(self._places[0], begin + step * row) for row in range(lanes)]


def _last_byte(field: Field) -> int:
    return field.byte + (field.shift + field.mask.bit_length() - 1) // 8


def _in_one_piece(fields: Sequence[Field]) -> list[Field]:
    """Return the fields of a code after merging neighbouring fields whose bits continue each other, even across
    bytes."""
    found: list[Field] = []
    for field in fields:
        mask = field.mask & (255 >> field.shift)
        before = found[-1] if found else field
        bits = before.mask.bit_length()
        follows = (field.left - before.left, 8 * (field.byte - before.byte) + field.shift - before.shift) == (
            bits,
            bits,
        )
        if found and follows:
            found[-1] = before._replace(mask=before.mask | mask << bits)
        else:
            found.append(field._replace(mask=mask))
    return found
