"""Products of rows with quantised matrices, straight from the file's layout, for any format and instruction set.

    matrix   row n | block | block | ...        each block: scales, codes (`smoe/formats/base.py`)
    x        k .................. in float32, once for many rows, with the sum of every group of numbers; within a group
                                  in the order of its runs, so that codes in neighbouring bytes meet neighbours

    output n = sum over groups of  scale * (codes . x)  -  offset * (sum of the group's x)

Codes are whole numbers of at most eight bits, so a product with a bf16 number is exact in float32, and nothing is
rounded but the sums: the error is far below that of bf16 products on dequantised weights. The order of sums is fixed
by format, shape and instruction set (grade E1). At the rates of memory a weight may take no more than some tenths of a
cycle: a code is widened, made a float and multiplied by one instruction each; whatever is once per group or block is
done for all groups of the block in one register.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir

from smoe.formats.base import Bits, Field, Format, Group, Scalar
from smoe.kernels import quantised_dots
from smoe.kernels.builder import BYTE, FLOAT, HALF, HALF_WORD, POINTER, WORD, Code, Value
from smoe.kernels.isa import Isa
from smoe.kernels.quantised_dots import subtracted

AT_ONCE = 4
"""Rows of the matrix in the making at the same time, for one row of x; they share what is loaded of it."""
AHEAD = 8192
"""Bytes between what is computed and what is fetched: a row is too short for the hardware to see a pattern in it."""
LINE = 64
UNROLLED = 64
"""Numbers of a row in one turn of the loop over blocks, at least; a few lines of memory are fetched in each."""
_ARGUMENTS = ("*given", "*w", "*out", "*bias", "begin", "end", "K")


def products_name(form: Format, rows: int) -> str:
    """Of the function that multiplies so many rows of x."""
    return f"products_{form.name}_{rows}"


def unpack_name(form: Format) -> str:
    return f"unpack_{form.name}"


def module_of(forms: Sequence[Format], isa: Isa) -> str:
    """Functions for every format, in LLVM's language.

    `products_F_1(x, w, out, bias, begin, end, K)` computes outputs begin ... end - 1 of one row; `bias` may be null.
    `products_F_2(pairs, w, -, -, begin, end, K)` and `products_F_4` have (x, out) of every row in `pairs`, and no bias.
    `unpack_F(out, w, -, -, begin, end, K)` writes those rows of the matrix as bf16. All take the same arguments, so
    that whoever calls them need not know which it is (`tasks.py`).
    """
    module = ir.Module()
    for form in forms:
        for rows in (1, 2, 4):
            _products(module, isa, form, rows)
        _unpack(module, isa, form)
    lines = str(module).splitlines()
    defined = [f"{line} #0" if line.startswith("define ") else line for line in lines if "target " not in line]
    return "\n".join([*defined, f"attributes #0 = {{ {isa.attributes} }}", ""])


class _Row(NamedTuple):
    """A row of x as the products read it."""

    numbers: Value
    """Address of K float32 numbers."""
    sums: Value
    """Address of the sum of every group of them; not filled where the format needs none."""


class _Scales(NamedTuple):
    """Of one block: registers with a number for every group."""

    gains: Value
    offsets: Value
    """None where nothing is to be subtracted."""


def _group_numbers(form: Format) -> int:
    return form.numbers // len(form.groups)


def _order(form: Format) -> list[int]:
    """The numbers of a group, counted from its first, run after run."""
    runs = form.groups[0].runs
    first = min(run.first for run in runs)
    return [run.first - first + i * run.step for run in runs for i in range(run.numbers)]


def _arranged(code: Code, registers: Sequence[Value], order: Sequence[int]) -> list[Value]:
    """Registers whose n-th number is number `order[n]` of those given; each takes its own from two at most."""
    lanes, arranged = code.isa.lanes, []
    if list(order) == list(range(len(order))):
        return list(registers)
    for begin in range(0, len(order), lanes):
        wanted = order[begin : begin + lanes]
        low, high = min(wanted) // lanes, max(wanted) // lanes
        assert {n // lanes for n in wanted} == {low, high}, wanted
        places = [n - low * lanes if n // lanes == low else n - high * lanes + lanes for n in wanted]
        arranged.append(code.build.shuffle_vector(registers[low], registers[high], code.words(places)))
    return arranged


def _has_offsets(isa: Isa, form: Format) -> bool:
    return form.minimum is not None or subtracted(isa, form) != 0


def _products(module: ir.Module, isa: Isa, form: Format, rows: int) -> None:
    code = Code(module, isa, products_name(form, rows), _ARGUMENTS)
    given, w, out, bias, begin, end, columns = code.arguments
    build = code.build
    if rows == 1:
        xs, outs = [_row(code, form, given, columns)], [out]
    else:
        xs = [_row(code, form, code.load(POINTER, code.at(given, 16 * r)), columns) for r in range(rows)]
        outs = [code.load(POINTER, code.at(given, 16 * r + 8)) for r in range(rows)]
    blocks = build.sdiv(columns, code.number(form.numbers))
    stride = build.mul(blocks, code.number(form.nbytes))
    at_once = AT_ONCE if rows == 1 else 2

    def strip(n: Value, count: int) -> None:
        matrix_rows = [code.at(w, build.mul(build.add(n, code.number(i)), stride)) for i in range(count)]
        totals = _dots(code, form, matrix_rows, xs, blocks)
        for i in range(count):
            place = build.mul(build.add(n, code.number(i)), code.number(2))
            for r in range(rows):
                total = code.biased(totals[i * rows + r], bias, place) if rows == 1 else totals[i * rows + r]
                result = code.rounded(code.splat(total, 1))
                code.store(build.extract_element(result, ir.Constant(WORD, 0)), code.at(outs[r], place))

    whole = build.sub(end, build.srem(build.sub(end, begin), code.number(at_once)))

    def several(n: Value, _: list[Value]) -> list[Value]:
        strip(n, at_once)
        return []

    def single(n: Value, _: list[Value]) -> list[Value]:
        strip(n, 1)
        return []

    code.loop(begin, whole, at_once, [], several)
    code.loop(whole, end, 1, [], single)
    code.end()


def _row(code: Code, form: Format, x: Value, columns: Value) -> _Row:
    """Arrange a row of bf16 numbers, widened where need be, and add up its groups where the format needs that."""
    build, lanes, size = code.build, code.isa.lanes, _group_numbers(form)
    is_in_halves = quantised_dots.fits(code.isa, form)
    numbers = code.scratch(build.mul(columns, code.number(4)))
    sums = code.scratch(build.mul(build.sdiv(columns, code.number(size)), code.number(4)))

    def group(k: Value, _: list[Value]) -> list[Value]:
        total, kept = None, []
        for i in range(0, size, lanes):
            place = build.mul(build.add(k, code.number(i)), code.number(2))
            halves = code.load(code.registers(HALF_WORD), code.at(x, place))
            wide = code.widened(halves)
            total = wide if total is None else build.fadd(total, wide)
            kept.append(halves if is_in_halves else wide)
        for n, arranged in enumerate(_arranged(code, kept, _order(form))):
            place = build.mul(build.add(k, code.number(n * lanes)), code.number(2 if is_in_halves else 4))
            code.store(arranged, code.at(numbers, place))
        if _has_offsets(code.isa, form):
            place = build.mul(build.sdiv(k, code.number(size)), code.number(4))
            code.store(code.summed(total), code.at(sums, place))
        return []

    code.loop(code.number(0), columns, size, [], group)
    return _Row(numbers, sums)


def _dots(code: Code, form: Format, matrix: Sequence[Value], xs: Sequence[_Row], blocks: Value) -> list[Value]:
    """The products of every row of the matrix with every row of x: row after row of the matrix."""
    build, groups = code.build, len(form.groups)
    count = len(matrix) * len(xs)
    has_offsets, in_halves = _has_offsets(code.isa, form), quantised_dots.fits(code.isa, form)
    begin = [code.reals(0.0)] * count + ([code.reals(0.0, groups)] * count if has_offsets else [])

    def block(b: Value, carried: list[Value]) -> list[Value]:
        totals, offsets = carried[:count], carried[count:]
        first = build.mul(b, code.number(form.nbytes))
        k = build.mul(b, code.number((2 if in_halves else 4) * form.numbers))
        places = [code.at(row, first) for row in matrix]
        scales = [_scales(code, form, place, subtracted(code.isa, form)) for place in places]
        numbers = [code.at(x.numbers, k) for x in xs]
        if in_halves:
            totals = quantised_dots.add_block(code, form, places, numbers, [each.gains for each in scales], totals)
        else:
            totals = _add_block(code, form, places, numbers, [each.gains for each in scales], totals)
        if offsets:
            place = build.mul(b, code.number(4 * groups))
            for n in range(count):
                x_sums = code.load(code.registers(FLOAT, groups), code.at(xs[n % len(xs)].sums, place), 4)
                offsets[n] = code.fma(scales[n // len(xs)].offsets, x_sums, offsets[n])
        return totals + offsets

    def blocks_of(several: int) -> Callable[[Value, list[Value]], list[Value]]:
        def together(b: Value, carried: list[Value]) -> list[Value]:
            ahead = build.add(build.mul(b, code.number(form.nbytes)), code.number(AHEAD))
            for row in matrix:
                for line in range(0, several * form.nbytes, LINE):
                    code.prefetch(code.at(code.at(row, ahead), line))
            for n in range(several):
                carried = block(build.add(b, code.number(n)), carried)
            return carried

        return together

    several = max(1, UNROLLED // form.numbers)
    whole = build.sub(blocks, build.srem(blocks, code.number(several)))
    ended = code.loop(code.number(0), whole, several, begin, blocks_of(several))
    if several > 1:
        ended = code.loop(whole, blocks, 1, ended, blocks_of(1))
    totals = [code.summed(total) for total in ended[:count]]
    if not has_offsets:
        return totals
    return [build.fsub(total, code.summed(offset)) for total, offset in zip(totals, ended[count:], strict=True)]


def _add_block(
    code: Code,
    form: Format,
    places: Sequence[Value],
    xs: Sequence[Value],
    gains: Sequence[Value],
    totals: Sequence[Value],
) -> list[Value]:
    """Totals plus one block of every row of the matrix times every row of x, scaled."""
    found = list(totals)
    for g, group in enumerate(form.groups):
        sums = _group_dots(code, form, group, places, xs)
        found = [code.fma(code.lane(gains[n // len(xs)], g), sums[n], total) for n, total in enumerate(found)]
    return found


def _group_dots(code: Code, form: Format, group: Group, places: Sequence[Value], xs: Sequence[Value]) -> list[Value]:
    """The codes of one group of every row of the matrix, times every row of x; unscaled."""
    lanes, build = code.isa.lanes, code.build
    sums: list[Value] = [None] * (len(places) * len(xs))
    begin = min(run.first for run in group.runs)
    for run in group.runs:
        for i in range(0, run.numbers, lanes):
            xs_here = [code.load(code.registers(FLOAT), code.at(x, 4 * (begin + i)), 4) for x in xs]
            for row, place in enumerate(places):
                codes = _codes(code, form, run.fields, place, i)
                for r, x in enumerate(xs_here):
                    n = row * len(xs) + r
                    sums[n] = build.fmul(codes, x) if sums[n] is None else code.fma(codes, x, sums[n])
        begin += run.numbers
    return sums


def _codes(code: Code, form: Format, fields: Sequence[Field | Bits], place: Value, i: int) -> Value:
    """The codes of numbers i, i + 1, ... of a run as floats, `zero` not yet subtracted."""
    build, kind = code.build, code.registers(WORD)
    if form.is_signed:
        (field,) = fields
        assert isinstance(field, Field)
        raw = code.load(code.registers(BYTE), code.at(place, field.byte + i))
        return build.sitofp(build.sext(raw, kind), code.registers(FLOAT))
    total = None
    for field in fields:
        part = _bits(code, field, place, i) if isinstance(field, Bits) else _field(code, field, place, i)
        total = part if total is None else build.or_(total, part)
    if form.table is not None:
        return code.looked_up(form.table, total)
    return build.sitofp(total, code.registers(FLOAT))


def _field(code: Code, field: Field, place: Value, i: int) -> Value:
    build, lanes = code.build, code.isa.lanes
    part = build.zext(code.load(code.registers(BYTE), code.at(place, field.byte + i)), code.registers(WORD))
    if field.shift:
        part = build.lshr(part, code.words([field.shift] * lanes))
    if field.mask != 255:
        part = build.and_(part, code.words([field.mask] * lanes))
    return build.shl(part, code.words([field.left] * lanes)) if field.left else part


def _bits(code: Code, bits: Bits, place: Value, i: int) -> Value:
    """A bit of its own byte for each number, from a word that holds them all."""
    build, lanes = code.build, code.isa.lanes
    word = code.load(ir.IntType(lanes), code.at(place, bits.byte + i // 8))
    flags = build.bitcast(word, ir.VectorType(ir.IntType(1), lanes))
    return build.shl(build.zext(flags, code.registers(WORD)), code.words([bits.left] * lanes))


def _scales(code: Code, form: Format, place: Value, zero: int) -> _Scales:
    """Gains and offsets of a block's groups; codes are too large by `zero`."""
    build, groups = code.build, len(form.groups)
    gains = code.splat(_scalar(code, form.scale, place), groups)
    codes = _group_codes(code, [group.scale for group in form.groups], place, form.has_signed_scales)
    if codes is not None:
        if form.scale_zero:
            codes = build.sub(codes, code.words([form.scale_zero] * groups))
        gains = build.fmul(build.sitofp(codes, code.registers(FLOAT, groups)), gains)
    by_gain = build.fmul(gains, code.reals(float(zero), groups)) if zero else None
    if form.minimum is None:
        return _Scales(gains, by_gain)
    offsets = code.splat(_scalar(code, form.minimum, place), groups)
    codes = _group_codes(code, [group.minimum for group in form.groups], place, False)
    if codes is not None:
        offsets = build.fmul(build.sitofp(codes, code.registers(FLOAT, groups)), offsets)
    return _Scales(gains, offsets if by_gain is None else build.fadd(offsets, by_gain))


def _scalar(code: Code, scalar: Scalar, place: Value) -> Value:
    build = code.build
    at = code.at(place, scalar.byte)
    if scalar.is_exponent:
        bits = build.shl(build.zext(code.load(BYTE, at), WORD), ir.Constant(WORD, 23))
        # 2 ** -127 has no bits of its own in that place
        tiny = ir.Constant(WORD, 1 << 22)
        is_least = build.icmp_unsigned("==", bits, ir.Constant(WORD, 0))
        return build.bitcast(build.select(is_least, tiny, bits), FLOAT)
    number = build.fpext(code.load(HALF, at), FLOAT)
    return number if scalar.sign > 0 else build.fneg(number)


def _group_codes(code: Code, fields_of: Sequence[tuple[Field, ...]], place: Value, is_signed: bool) -> Value:
    """A code for every group, in one register; None where groups have none."""
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


def _unpack(module: ir.Module, isa: Isa, form: Format) -> None:
    """Rows of the matrix as bf16."""
    code = Code(module, isa, unpack_name(form), _ARGUMENTS)
    out, w, _, _, begin, end, columns = code.arguments
    build = code.build
    blocks = build.sdiv(columns, code.number(form.numbers))
    first, last = build.mul(begin, blocks), build.mul(end, blocks)
    order = _order(form)
    in_order = [order.index(n) for n in range(len(order))]

    def block(b: Value, _: list[Value]) -> list[Value]:
        place = code.at(w, build.mul(b, code.number(form.nbytes)))
        to = code.at(out, build.mul(b, code.number(2 * form.numbers)))
        scales = _scales(code, form, place, form.zero)
        for g, group in enumerate(form.groups):
            gain = code.lane(scales.gains, g)
            offset = None if scales.offsets is None else build.fneg(code.lane(scales.offsets, g))
            numbers = []
            for run in group.runs:
                for i in range(0, run.numbers, isa.lanes):
                    codes = _codes(code, form, run.fields, place, i)
                    numbers.append(build.fmul(gain, codes) if offset is None else code.fma(gain, codes, offset))
            at = min(run.first for run in group.runs)
            for n, number in enumerate(_arranged(code, numbers, in_order)):
                code.store(code.rounded(number), code.at(to, 2 * (at + n * isa.lanes)))
        return []

    code.loop(first, last, 1, [], block)
    code.end()
