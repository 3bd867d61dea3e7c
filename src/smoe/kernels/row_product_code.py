"""Generates the machine code of `row_product.py`: products of one, two or four rows with a bf16 matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from smoe.kernels.builder import Code, copies
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import BFLOAT, FLOAT, HALF_WORD, LONG, POINTER, WORD, Value
from smoe.kernels.row_product import AHEAD, LANES, TILE


def add_row_product(module: ir.Module, isa: Isa) -> None:
    """Add the function `row_product(x, w, out, bias, begin, end, K, part, length)`, which computes the outputs from
    `begin` to `end` - 1 of one row.

    It does so in strips of 16 outputs, and along K in parts of `part`, chains of `length` and tiles of 32 elements.
    `bias` may be null; torch adds it before rounding.
    """
    names = ("&x", "&w", "&out", "&bias", "begin", "end", "K", "part", "length")
    code = Code(module, isa, "row_product", names, is_local=True)
    x, w, out, bias, *bounds = code.arguments
    build = code.build
    has_bias = build.icmp_unsigned("!=", bias, ir.Constant(POINTER, None))

    def with_bias(n: Value, total: Value) -> Value:
        halves = code.load(code.registers(HALF_WORD, LANES), code.element(bias, HALF_WORD, n), 2)
        return build.fadd(total, code.widened(halves))

    def finished(n: Value, totals: Sequence[Value]) -> Sequence[Value]:
        return code.either(has_bias, totals, lambda: [with_bias(n, totals[0])])

    _add_strips(code, [(x, out)], w, bounds, finished)


def add_row_products(module: ir.Module, isa: Isa, rows: int) -> None:
    """Add the function `row_product_2` or `row_product_4`. Its arguments are those of `row_product`, with a pointer to
    (x, out) of every row instead of x and out, and no bias.

    Weights are transposed in registers once for all rows, because transposing takes longer than multiplying.
    """
    names = ("&pairs", "&w", "begin", "end", "K", "part", "length")
    code = Code(module, isa, f"row_product_{rows}", names, is_local=True)
    pairs, w, *bounds = code.arguments
    pointers = [code.load(POINTER, code.element(pairs, LONG, n), 8) for n in range(2 * rows)]
    _add_strips(code, list(zip(pointers[::2], pointers[1::2], strict=True)), w, bounds, lambda n, totals: totals)


def _add_strips(
    code: Code,
    rows: Sequence[tuple[Value, Value]],
    w: Value,
    bounds: Sequence[Value],
    finished: Callable[[Value, Sequence[Value]], Sequence[Value]],
) -> None:
    """Build the rest of a function: a loop over strips of 16 outputs of all `rows` (x, out). `finished(n, totals)`
    returns the results of the strip of output `n`."""
    build, (begin, end, columns, part, length) = code.build, bounds
    wrapped = build.add(build.mul(columns, code.number(LANES - 1)), code.number(AHEAD))
    nothing = [copies(code.registers(FLOAT, LANES), 0.0)] * len(rows)
    kind = code.registers(BFLOAT, LANES)
    convert = ir.FunctionType(kind, [code.registers(FLOAT, LANES)])

    def strip(n: Value, _: list[Value]) -> list[Value]:
        places = [build.mul(n, columns)]
        for _number in range(1, LANES):
            places.append(build.add(places[-1], columns))

        def tile(k: Value, sums: list[Value]) -> list[Value]:
            later = build.add(k, code.number(AHEAD))
            ahead = build.select(build.icmp_signed(">=", later, columns), wrapped, code.number(AHEAD))
            pairs = code.transposed([_loaded(code, w, build.add(k, place), ahead) for place in places])
            return [_with_dots(code, total, x, k, pairs) for total, (x, _) in zip(sums, rows, strict=True)]

        def piece(p: Value, totals: list[Value]) -> list[Value]:
            until = code.smaller(build.add(p, part), columns)

            def chain(c: Value, sums: list[Value]) -> list[Value]:
                last = code.repeat(c, code.smaller(build.add(c, length), until), TILE, nothing, tile)
                return [build.fadd(found, total) for found, total in zip(last, sums, strict=True)]

            sums = code.repeat(p, until, length, nothing, chain)
            is_first = build.icmp_signed("==", p, code.number(0))
            added = [build.fadd(total, found) for total, found in zip(totals, sums, strict=True)]
            return [build.select(is_first, found, more) for found, more in zip(sums, added, strict=True)]

        totals = finished(n, code.repeat(code.number(0), columns, part, nothing, piece))
        for total, (_, out) in zip(totals, rows, strict=True):
            halves = code.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", convert, [total])
            code.store(halves, code.element(out, HALF_WORD, n), 2)
        return []

    code.repeat(begin, end, LANES, [], strip, may_be_empty=True)
    code.end()


def _loaded(code: Code, w: Value, place: Value, ahead: Value) -> Value:
    """Return 32 weights from element `place` on, and prefetch the weights `ahead` elements further."""
    at = code.element(w, HALF_WORD, place)
    weights = code.load(code.registers(WORD, LANES), at, 2)
    code.prefetch(code.element(at, HALF_WORD, ahead), is_read_once=True)
    return weights


def _with_dots(code: Code, total: Value, x: Value, k: Value, pairs: Sequence[Value]) -> Value:
    """Return the running sum of an activation row after 16 further steps, each for two elements along K."""
    build = code.build
    kind, halves = code.registers(FLOAT, LANES), code.registers(BFLOAT, 2 * LANES)
    dots = ir.FunctionType(kind, [kind, halves, halves])
    for j, pair in enumerate(pairs):
        word = code.load(WORD, code.element(x, HALF_WORD, build.add(k, code.number(2 * j))), 2)
        both = build.bitcast(code.splat(word, LANES), halves)
        total = code.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", dots, [total, both, build.bitcast(pair, halves)])
    return total
