"""Reads quantized blocks in machine code: codes as floats, the scales of groups, and the order of elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from smoe.formats.base import Bits, Field, Format, Points, Scalar
from smoe.kernels.builder import Code
from smoe.kernels.kinds import BYTE, FLOAT, HALF, HALF_WORD, LONG, WORD, Value


class Row(NamedTuple):
    """A row of activations x, in the order of elements and the number type that the products need."""

    numbers: Value
    """The address of its K numbers in float32 or bf16."""
    sums: Value
    """The address of the sums of its groups; undefined if the format needs no sums."""


class Scales(NamedTuple):
    """The scales of one quantized block, as registers with one number per group."""

    gains: Value
    offsets: Value
    """The numbers to subtract; None if there are none."""


def group_numbers(form: Format) -> int:
    """Return the number of elements that share a scale in a quantized format (a group)."""
    return form.numbers // len(form.groups)


def order_of(form: Format) -> list[int]:
    """Return the indices of a group's elements, relative to its first element, in the order in which the format stores
    their codes."""
    runs = form.groups[0].runs
    first = min(run.first for run in runs)
    return [run.first - first + i * run.step for run in runs for i in range(run.numbers)]


def arranged(code: Code, registers: Sequence[Value], order: Sequence[int]) -> list[Value]:
    """Return the numbers of several registers in another order: number n of the result is number `order[n]`. Each
    result register may read at most two registers."""
    lanes, found = code.isa.lanes, []
    if list(order) == list(range(len(order))):
        return list(registers)
    for begin in range(0, len(order), lanes):
        wanted = order[begin : begin + lanes]
        low, high = min(wanted) // lanes, max(wanted) // lanes
        assert {n // lanes for n in wanted} == {low, high}, wanted
        places = [n - low * lanes if n // lanes == low else n - high * lanes + lanes for n in wanted]
        found.append(code.build.shuffle_vector(registers[low], registers[high], code.words(places)))
    return found


def codes_of(code: Code, form: Format, fields: Sequence[Field | Bits | Points], place: Value, i: int) -> Value:
    """Return the codes of a run's elements, from element `i` on, as floats. The format's `zero` has not been
    subtracted."""
    build, kind = code.build, code.registers(WORD)
    if form.is_signed:
        (field,) = fields
        assert isinstance(field, Field)
        raw = code.load(code.registers(BYTE), code.at(place, field.byte + i))
        return build.sitofp(build.sext(raw, kind), code.registers(FLOAT))
    if form.is_float8:
        (field,) = fields
        assert isinstance(field, Field)
        return float8(code, code.load(code.registers(BYTE), code.at(place, field.byte + i)))
    if form.reals:
        return _reals(code, form.reals, place, i)
    if form.grid is not None:
        (points,) = fields
        assert isinstance(points, Points)
        return _of_points(code, points, place, i)
    total = None
    for field in fields:
        assert not isinstance(field, Points)
        part = _bits(code, field, place, i) if isinstance(field, Bits) else _field(code, field, place, i)
        total = part if total is None else build.or_(total, part)
    if form.table is not None:
        return code.looked_up(form.table, total)
    return build.sitofp(total, code.registers(FLOAT))


def float8(code: Code, codes: Value) -> Value:
    """Return E4M3 numbers, given as bytes, as floats. They are converted through fp16, which has one more bit of
    exponent and a bias greater by 8."""
    build, count = code.build, codes.type.count
    raw = build.zext(codes, code.registers(HALF_WORD, count))
    sign = build.shl(build.and_(raw, code.halves([128] * count)), code.halves([8] * count))
    rest = build.shl(build.and_(raw, code.halves([127] * count)), code.halves([7] * count))
    half = build.bitcast(build.or_(sign, rest), code.registers(HALF, count))
    return build.fmul(build.fpext(half, code.registers(FLOAT, count)), code.reals(256.0, count))


def _field(code: Code, field: Field, place: Value, i: int) -> Value:
    build, lanes = code.build, code.isa.lanes
    part = build.zext(code.load(code.registers(BYTE), code.at(place, field.byte + i)), code.registers(WORD))
    if field.shift:
        part = build.lshr(part, code.words([field.shift] * lanes))
    if field.mask != 255:
        part = build.and_(part, code.words([field.mask] * lanes))
    return build.shl(part, code.words([field.left] * lanes)) if field.left else part


def _bits(code: Code, bits: Bits, place: Value, i: int) -> Value:
    """Return one bit of the code of each element, shifted to the bit's position in the code. One word in memory
    contains this bit of all elements."""
    lanes = code.isa.lanes
    word = code.load(ir.IntType(lanes), code.at(place, bits.byte + i // 8))
    return code.where_set(word, code.words([1 << bits.left] * lanes), code.words([0] * lanes))


def _reals(code: Code, kind: str, place: Value, i: int) -> Value:
    """Return the elements from `i` on of a run of unquantized numbers, which begin at the address `place`."""
    if kind == "F32":
        return code.load(code.registers(FLOAT), code.at(place, 4 * i))
    if kind == "BF16":
        return code.widened(code.load(code.registers(HALF_WORD), code.at(place, 2 * i)))
    return code.build.fpext(code.load(code.registers(HALF), code.at(place, 2 * i)), code.registers(FLOAT))


def _of_points(code: Code, points: Points, place: Value, i: int) -> Value:
    """Return the elements from `i` on of a run that is stored as indices of grid points (a codebook of short vectors).
    The points are looked up one after the other."""
    build, grid, lanes = code.build, points.grid, code.isa.lanes
    table, kind = code.constant(grid.name, grid.points.tobytes()), ir.IntType(8 * grid.width)
    count, first = lanes // grid.width, i // grid.width
    joined = ir.Constant(ir.VectorType(kind, count), ir.Undefined)
    for n in range(count):
        index = build.zext(_one_code(code, points.indices[first + n], place), LONG)
        point = code.load(kind, code.at(table, build.mul(index, code.number(grid.width))))
        joined = build.insert_element(joined, point, ir.Constant(WORD, n))
    whole = build.sext(build.bitcast(joined, code.registers(BYTE)), code.registers(WORD))
    if not points.signs:
        return build.sitofp(whole, code.registers(FLOAT))
    word = ir.Constant(WORD, 0)
    for n in range(lanes // 8):
        signs = _one_code(code, points.signs[i // 8 + n], place)
        if points.has_even_signs:
            signs = _with_eighth_sign(code, signs)
        word = build.or_(word, build.shl(signs, ir.Constant(WORD, 8 * n)))
    signed = code.where_set(build.trunc(word, ir.IntType(lanes)), build.neg(whole), whole)
    return build.sitofp(signed, code.registers(FLOAT))


def _with_eighth_sign(code: Code, signs: Value) -> Value:
    """Return 32 bits with seven signs and an eighth, which is chosen so that an even number of bits is set."""
    build, odd = code.build, signs
    for by in (4, 2, 1):
        odd = build.xor(odd, build.lshr(odd, ir.Constant(WORD, by)))
    return build.or_(signs, build.shl(build.and_(odd, ir.Constant(WORD, 1)), ir.Constant(WORD, 7)))


def _one_code(code: Code, fields: Sequence[Field], place: Value) -> Value:
    """Return one code of a block as 32 bits."""
    build, total = code.build, None
    for field in fields:
        part = build.zext(code.load(BYTE, code.at(place, field.byte)), WORD)
        part = build.and_(build.lshr(part, ir.Constant(WORD, field.shift)), ir.Constant(WORD, field.mask))
        part = build.shl(part, ir.Constant(WORD, field.left))
        total = part if total is None else build.or_(total, part)
    return total


def scales_of(code: Code, form: Format, place: Value, zero: int) -> Scales:
    """Return the factors and the offsets of the groups of the block at the address `place`. `zero`: the number that is
    subtracted from each code; the offsets include it."""
    build, groups = code.build, len(form.groups)
    gains = code.splat(_scalar(code, form.scale, place), groups)
    codes = _scale_codes(code, form, place)
    if codes is not None:
        gains = build.fmul(codes, gains)
    by_gain = build.fmul(gains, code.reals(float(zero), groups)) if zero else None
    if form.minimum is None:
        return Scales(gains, by_gain)
    offsets = code.splat(_scalar(code, form.minimum, place), groups)
    codes = _group_codes(code, [group.minimum for group in form.groups], place, False)
    if codes is not None:
        offsets = build.fmul(build.sitofp(codes, code.registers(FLOAT, groups)), offsets)
    return Scales(gains, offsets if by_gain is None else build.fadd(offsets, by_gain))


def _scale_codes(code: Code, form: Format, place: Value) -> Value:
    """Return the scale codes of a block's groups as floats; the block's scale is multiplied by them. Return None if the
    format's groups have no scales."""
    build, groups = code.build, len(form.groups)
    codes = _group_codes(code, [group.scale for group in form.groups], place, form.has_signed_scales)
    if codes is None:
        return None
    if form.has_float8_scales:
        return float8(code, build.trunc(codes, code.registers(BYTE, groups)))
    if form.scale_zero:
        codes = build.sub(codes, code.words([form.scale_zero] * groups))
    return build.sitofp(codes, code.registers(FLOAT, groups))


def _scalar(code: Code, scalar: Scalar, place: Value) -> Value:
    build = code.build
    at = code.at(place, scalar.byte)
    if scalar.kind == "ONE":
        return ir.Constant(FLOAT, scalar.factor)
    if scalar.kind == "E8M0":
        bits = build.shl(build.zext(code.load(BYTE, at), WORD), ir.Constant(WORD, 23))
        # 2 ** -127 is subnormal
        tiny = ir.Constant(WORD, 1 << 22)
        is_least = build.icmp_unsigned("==", bits, ir.Constant(WORD, 0))
        return build.bitcast(build.select(is_least, tiny, bits), FLOAT)
    if scalar.fields:
        bits = build.trunc(_one_code(code, scalar.fields, place), HALF_WORD)
        return code.times(build.fpext(build.bitcast(bits, HALF), FLOAT), scalar.factor)
    number = code.load(FLOAT, at) if scalar.kind == "F32" else build.fpext(code.load(HALF, at), FLOAT)
    return code.times(number, scalar.factor)


def _group_codes(code: Code, fields_of: Sequence[tuple[Field, ...]], place: Value, is_signed: bool) -> Value:
    """Return a register with one code for each group of a block, for example its scale code. `fields_of`: for each
    group, the bit fields of the code. Return None if the fields are empty."""
    if not fields_of[0]:
        return None
    build, groups = code.build, len(fields_of)
    used = [field.byte for fields in fields_of for field in fields]
    first, span = min(used), max(used) + 1 - min(used)
    raw = code.load(code.registers(BYTE, span), code.at(place, first))
    total = None
    for n in range(max(map(len, fields_of))):
        fields = [of[n] if n < len(of) else Field(first, 0, 0) for of in fields_of]
        picked = code.pick(raw, [field.byte - first for field in fields])
        if is_signed:
            return build.sext(picked, code.registers(WORD, groups))
        part = build.zext(picked, code.registers(WORD, groups))
        part = build.lshr(part, code.words([field.shift for field in fields]))
        part = build.and_(part, code.words([field.mask for field in fields]))
        part = build.shl(part, code.words([field.left for field in fields]))
        total = part if total is None else build.or_(total, part)
    return total
