"""Products of rows with quantized matrices in the layout of the file, for any format and instruction set.

    matrix      row n | block | block | ...        each block: scales, codes (`formats/base.py`)
    x           k .................. in float32, converted once, with the sum of every group; within a group in the
                                     order of its runs, so that codes in neighbouring bytes multiply neighbours
    output n = sum over groups of  scale * (codes . x)    -    offset * (sum of the group's x)

Codes are integers of at most eight bits, so a product with a bf16 number is exact in float32, and only the sums are
rounded. The error is far below that of bf16 products on dequantized weights. The order of sums depends on format, shape
and instruction set (grade E1).

A product that is limited by memory leaves only tenths of a cycle for each weight. So converting a code to 32 bits,
converting it to a float, and multiplying it are one instruction each. What is needed once per group or block is
computed in one register for all groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir

from smoe.formats.base import Format, Group
from smoe.kernels import byte_products, byte_rows, interleaving, quantised_dots
from smoe.kernels.builder import Code, text_of
from smoe.kernels.byte_layout import Layout
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, POINTER, Value
from smoe.kernels.quantised_block import Row, arranged, codes_of, group_numbers, order_of, scales_of
from smoe.kernels.quantised_dots import subtracted

AT_ONCE = 4
"""The number of rows of the matrix that are multiplied at once with one row of x, which is then loaded only once for
them."""
AHEAD = 8192
"""The distance between computation and prefetch, in bytes. Rows are too short for hardware prefetchers."""
LINE = 64
UNROLLED = 64
"""The least number of elements in one iteration of the loop over blocks. Each iteration prefetches some cache lines."""
_ARGUMENTS = ("*given", "*w", "*out", "*bias", "begin", "end", "K")


def products_name(form: Format, rows: int) -> str:
    """Return the name of the function that multiplies `rows` activation rows with a quantized matrix."""
    return f"products_{form.name}_{rows}"


def unpack_name(form: Format) -> str:
    return f"unpack_{form.name}"


def module_of(forms: Sequence[Format], isa: Isa) -> str:
    """Return the LLVM text of the functions that multiply bf16 rows with matrices of these formats.

    `products_F_1(x, w, out, bias, begin, end, K)` computes the outputs from `begin` to `end` - 1 of one row; `bias` may
    be null. `products_F_2(pairs, w, -, -, begin, end, K)` and `products_F_4` find (x, out) of every row in `pairs`, and
    have no bias. `unpack_F(out, w, -, -, begin, end, K)` dequantizes the rows of the matrix from `begin` to `end` - 1
    to bf16. All functions have the same argument types, so callers need not distinguish them (`tasks.py`).
    """
    module = ir.Module()
    for form in forms:
        for rows in (1, 2, 4):
            _products(module, isa, form, _way(isa, form), rows)
        _unpack(module, isa, form)
    return text_of(module, isa.attributes)


def byte_names(form: Format) -> list[str]:
    """Return the names of the functions for rows in 8 bits: for rounding, for the gate with rounding, for products, and
    for dequantizing rows of the matrix. If rows are interleaved, the last one interleaves them."""
    layout = Layout.of(form)
    return [
        byte_rows.function_name(layout),
        byte_rows.gated_function_name(layout),
        byte_products.function_name(form),
        interleaving.function_name(form) if form.rows > 1 else unpack_name(form),
    ]


def byte_module_of(form: Format, isa: Isa) -> str:
    """Return the LLVM text of the functions in `byte_names`."""
    module = ir.Module()
    byte_rows.add_function(module, isa, form, _ARGUMENTS)
    byte_rows.add_gated_function(module, isa, form, _ARGUMENTS)
    byte_products.add_function(module, isa, form, _ARGUMENTS)
    if form.rows > 1:
        interleaving.add_function(module, isa, form, _ARGUMENTS)
    else:
        _unpack(module, isa, form)
    return text_of(module, isa.attributes)


class _Way(NamedTuple):
    """The method by which the activation rows x are multiplied with a quantized matrix."""

    zero: int
    """The number that is subtracted from codes, by way of the sums of x, after the multiplication."""
    add_block: Callable[
        [Code, Format, Sequence[Value], Sequence[Row], Value, Sequence[Value], Sequence[Value]], list[Value]
    ]
    """The function that adds one block, with the arguments of `_add_halves`."""


def _way(isa: Isa, form: Format) -> _Way:
    return _Way(subtracted(isa, form), _add_halves if quantised_dots.fits(isa, form) else _add_reals)


def _has_offsets(way: _Way, form: Format) -> bool:
    return form.minimum is not None or way.zero != 0


def _products(module: ir.Module, isa: Isa, form: Format, way: _Way, rows: int) -> None:
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
        totals = _dots(code, form, way, matrix_rows, xs, blocks)
        for i in range(count):
            place = build.mul(build.add(n, code.number(i)), code.number(2))
            for r in range(rows):
                one = code.splat(totals[i * rows + r], 1)
                code.store(code.rounded(code.biased(one, bias, place) if rows == 1 else one), code.at(outs[r], place))

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


def _row(code: Code, form: Format, x: Value, columns: Value) -> Row:
    """Return the bf16 row x for products with a quantized matrix: in the order of the format's runs, converted to
    float32 if necessary, with the sums of its groups if they are needed."""
    build, lanes, size = code.build, code.isa.lanes, group_numbers(form)
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
        for n, register in enumerate(arranged(code, kept, order_of(form))):
            place = build.mul(build.add(k, code.number(n * lanes)), code.number(2 if is_in_halves else 4))
            code.store(register, code.at(numbers, place))
        if form.minimum is not None or subtracted(code.isa, form):
            place = build.mul(build.sdiv(k, code.number(size)), code.number(4))
            code.store(code.summed(total), code.at(sums, place))
        return []

    code.loop(code.number(0), columns, size, [], group)
    return Row(numbers, sums)


def _dots(
    code: Code, form: Format, way: _Way, matrix: Sequence[Value], xs: Sequence[Row], blocks: Value
) -> list[Value]:
    """Return the products of every row of the matrix with every row of x, ordered by row of the matrix."""
    build, groups = code.build, len(form.groups)
    count, has_offsets = len(matrix) * len(xs), _has_offsets(way, form)
    begin = [code.reals(0.0)] * count + ([code.reals(0.0, groups)] * count if has_offsets else [])

    def one(b: Value, carried: list[Value]) -> list[Value]:
        """Return the running sums after adding the products of block number `b`."""
        totals, offsets = carried[:count], carried[count:]
        first = build.mul(b, code.number(form.nbytes))
        places = [code.at(row, first) for row in matrix]
        scales = [scales_of(code, form, place, way.zero) for place in places]
        totals = way.add_block(code, form, places, xs, b, [each.gains for each in scales], totals)
        for m in range(len(offsets)):
            place = build.mul(b, code.number(4 * groups))
            x_sums = code.load(code.registers(FLOAT, groups), code.at(xs[m % len(xs)].sums, place), 4)
            offsets[m] = code.fma(scales[m // len(xs)].offsets, x_sums, offsets[m])
        return totals + offsets

    def blocks_of(several: int) -> Callable[[Value, list[Value]], list[Value]]:
        def together(b: Value, carried: list[Value]) -> list[Value]:
            ahead = build.add(build.mul(b, code.number(form.nbytes)), code.number(AHEAD))
            for row in matrix:
                for line in range(0, several * form.nbytes, LINE):
                    code.prefetch(code.at(code.at(row, ahead), line))
            for n in range(several):
                carried = one(build.add(b, code.number(n)), carried)
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


def _add_halves(
    code: Code,
    form: Format,
    places: Sequence[Value],
    xs: Sequence[Row],
    block: Value,
    gains: Sequence[Value],
    totals: Sequence[Value],
) -> list[Value]:
    """Return `totals` plus the scaled products of one block, for every row of the matrix and every row of x, with x in
    bf16."""
    first = code.build.mul(block, code.number(2 * form.numbers))
    return quantised_dots.add_block(code, form, places, [code.at(x.numbers, first) for x in xs], gains, totals)


def _add_reals(
    code: Code,
    form: Format,
    places: Sequence[Value],
    xs: Sequence[Row],
    block: Value,
    gains: Sequence[Value],
    totals: Sequence[Value],
) -> list[Value]:
    """Return `totals` plus the scaled products of one block, for every row of the matrix and every row of x, with x in
    float32."""
    first = code.build.mul(block, code.number(4 * form.numbers))
    numbers, found = [code.at(x.numbers, first) for x in xs], list(totals)
    for g, group in enumerate(form.groups):
        sums = _group_dots(code, form, group, places, numbers)
        found = [code.fma(code.lane(gains[n // len(xs)], g), sums[n], total) for n, total in enumerate(found)]
    return found


def _group_dots(code: Code, form: Format, group: Group, places: Sequence[Value], xs: Sequence[Value]) -> list[Value]:
    """Return the products of one group's codes with x, before the group's scale is applied, for every row of the matrix
    and every row of x."""
    lanes, build = code.isa.lanes, code.build
    sums: list[Value] = [None] * (len(places) * len(xs))
    begin = min(run.first for run in group.runs)
    for run in group.runs:
        for i in range(0, run.numbers, lanes):
            xs_here = [code.load(code.registers(FLOAT), code.at(x, 4 * (begin + i)), 4) for x in xs]
            for row, place in enumerate(places):
                codes = codes_of(code, form, run.fields, place, i)
                for r, x in enumerate(xs_here):
                    n = row * len(xs) + r
                    sums[n] = build.fmul(codes, x) if sums[n] is None else code.fma(codes, x, sums[n])
        begin += run.numbers
    return sums


def _unpack(module: ir.Module, isa: Isa, form: Format) -> None:
    """Add the function that dequantizes rows of a matrix of one format to bf16."""
    code = Code(module, isa, unpack_name(form), _ARGUMENTS)
    out, w, _, _, begin, end, columns = code.arguments
    build = code.build
    blocks = build.sdiv(columns, code.number(form.numbers))
    first, last = build.mul(begin, blocks), build.mul(end, blocks)
    order = order_of(form)
    in_order = [order.index(n) for n in range(len(order))]

    def block(b: Value, _: list[Value]) -> list[Value]:
        place = code.at(w, build.mul(b, code.number(form.nbytes)))
        to = code.at(out, build.mul(b, code.number(2 * form.numbers)))
        scales = scales_of(code, form, place, form.zero)
        for g, group in enumerate(form.groups):
            gain = code.lane(scales.gains, g)
            offset = None if scales.offsets is None else build.fneg(code.lane(scales.offsets, g))
            numbers = []
            for run in group.runs:
                for i in range(0, run.numbers, isa.lanes):
                    codes = codes_of(code, form, run.fields, place, i)
                    numbers.append(build.fmul(gain, codes) if offset is None else code.fma(gain, codes, offset))
            at = min(run.first for run in group.runs)
            for n, number in enumerate(arranged(code, numbers, in_order)):
                code.store(code.rounded(number), code.at(to, 2 * (at + n * isa.lanes)))
        return []

    code.loop(first, last, 1, [], block)
    code.end()
