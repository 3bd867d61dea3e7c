"""Generates the machine code of `many_rows.py`, which explains the method. The functions call each other like this:

pack_many_rows            registers of rows, packed for the tiles
many_rows                 some outputs of all rows
  for every part of K
    widen                 the part of the weights, in float32
    tiles_1, _2, _3       running sums of a panel of rows
  store                   bias, rounding, storing
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from smoe.kernels.builder import Code, text_of
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, LONG, POINTER, WORD, Value
from smoe.kernels.many_rows import OUTPUTS
from smoe.kernels.prompt_rows import put, register, smaller, times

PACK, PRODUCTS = "pack_many_rows", "many_rows"
"""The names of the module's functions."""
PANEL = 3
"""The number of registers of rows in a panel. With 4 outputs (8 with 32 registers) they make 12 (24) running sums."""
_PART_BYTES = 12 << 10
"""The largest size of a part of a panel, which stays in the first-level cache while the outputs are computed."""
_PAD = 64
"""The number of unused bytes after each row of weights, without which a column would map to few sets of the cache."""
_TURNS = 4
"""The number of columns in one iteration of the innermost loop."""
_LINE = 64


def module_of(isa: Isa) -> str:
    """Return the LLVM text of `pack_many_rows(given, -, packed, -, begin, end, K)` and `many_rows(given, w, packed,
    bias, begin, end, K)`.

    `given` contains the number of rows, and then for each row two addresses: of the row (bf16 [K]), and of its outputs
    (bf16). The first function packs registers `begin` to `end` - 1 of rows. The second one computes outputs `begin` to
    `end` - 1, at most `OUTPUTS` of them, from all packed rows; `bias` may be null.
    """
    module = ir.Module()
    _pack(module, isa)
    _widen(module, isa)
    for vectors in range(1, PANEL + 1):
        _tiles(module, isa, vectors)
    _store(module, isa)
    _products(module, isa)
    return text_of(module, f"noinline {isa.attributes}")


def _part(isa: Isa) -> int:
    """Return the number of columns that are computed at a time."""
    return _PART_BYTES // (4 * isa.lanes * PANEL)


def _row_bytes(isa: Isa) -> int:
    """Return the distance between rows of weights in float32."""
    return 4 * _part(isa) + _PAD


def _tile(isa: Isa, vectors: int) -> int:
    """Return the number of outputs whose running sums are in registers together, for panels of `vectors` registers."""
    return 8 if vectors == 1 or isa.registers >= 32 else 4


def _registers_of(code: Code, rows: Value) -> Value:
    lanes = code.isa.lanes
    return code.build.udiv(code.build.add(rows, code.number(lanes - 1)), code.number(lanes))


def _row_address(code: Code, given: Value, n: Value, which: int) -> Value:
    """Return the address of row `n` (`which` is 0) or of its outputs (1). For the rows that fill up the last register,
    it is that of the last row."""
    last = code.build.sub(code.load(LONG, given, 8), code.number(1))
    place = code.at(given, times(code, smaller(code, n, last), 16))
    return code.load(POINTER, code.at(place, 8 + 8 * which), 8)


def _pack(module: ir.Module, isa: Isa) -> None:
    """Add the function `pack_many_rows`. A panel has the numbers of column 0 of all its rows, then those of column
    1."""
    code = Code(module, isa, PACK, ("*given", "*-", "*packed", "*--", "begin", "end", "K"))
    given, _, packed, _, begin, end, columns = code.arguments
    build, lanes = code.build, isa.lanes
    registers = _registers_of(code, code.load(LONG, given, 8))
    whole = build.and_(columns, code.number(-2 * lanes))

    def pack(v: Value, _: list[Value]) -> list[Value]:
        first = times(code, build.udiv(v, code.number(PANEL)), PANEL)
        line = times(code, smaller(code, build.sub(registers, first), PANEL), 4 * lanes)
        to = code.at(packed, times(code, times(code, first, columns), 4 * lanes))
        to = code.at(to, times(code, build.sub(v, first), 4 * lanes))
        rows = [_row_address(code, given, build.add(times(code, v, lanes), code.number(r)), 0) for r in range(lanes)]

        def pairs(k: Value, _: list[Value]) -> list[Value]:
            words = [code.load(code.registers(WORD), code.at(row, times(code, k, 2))) for row in rows]
            for j, pair in enumerate(code.transposed(words)):
                for half, numbers in enumerate(code.even_and_odd(pair)):
                    place = times(code, build.add(k, code.number(2 * j + half)), line)
                    code.store(numbers, code.at(to, place), 4 * lanes)
            return []

        def column(k: Value, _: list[Value]) -> list[Value]:
            halves = code.loaded_each(HALF_WORD, [code.at(row, times(code, k, 2)) for row in rows])
            code.store(code.widened(halves), code.at(to, times(code, k, line)), 4 * lanes)
            return []

        code.loop(code.number(0), whole, 2 * lanes, [], pairs)
        code.loop(whole, columns, 1, [], column)
        return []

    code.loop(begin, end, 1, [], pack)
    code.end()


def _widen(module: ir.Module, isa: Isa) -> None:
    """Add the function `widen(w, stride, to, count, outputs)`, which converts `count` columns of `outputs` rows of
    weights to float32. The last row is repeated up to a whole tile. The following part of every row is prefetched."""
    code = Code(module, isa, "widen", ("*w", "stride", "*to", "count", "outputs"), is_local=True)
    w, stride, to, count, outputs = code.arguments
    build, lanes, most = code.build, isa.lanes, _tile(isa, 1)
    whole, last = build.and_(count, code.number(-lanes)), build.sub(outputs, code.number(1))
    end = build.and_(build.add(outputs, code.number(most - 1)), code.number(-most))

    def row(n: Value, _: list[Value]) -> list[Value]:
        from_ = code.at(w, build.mul(smaller(code, n, last), stride))
        place = code.at(to, times(code, n, _row_bytes(isa)))
        for line in range(0, 2 * _part(isa), _LINE):
            code.prefetch(code.at(from_, 2 * _part(isa) + line), is_read_once=True)

        def some(k: Value, _: list[Value]) -> list[Value]:
            halves = code.load(code.registers(HALF_WORD), code.at(from_, times(code, k, 2)))
            code.store(code.widened(halves), code.at(place, times(code, k, 4)), 4 * lanes)
            return []

        def one(k: Value, _: list[Value]) -> list[Value]:
            half = code.load(HALF_WORD, code.at(from_, times(code, k, 2)))
            code.store(code.widened(half), code.at(place, times(code, k, 4)), 4)
            return []

        code.loop(code.number(0), whole, lanes, [], some)
        code.loop(whole, count, 1, [], one)
        return []

    code.loop(code.number(0), end, 1, [], row)
    code.end()


def _tiles(module: ir.Module, isa: Isa, vectors: int) -> None:
    """Add the function `tiles_V(x, weights, sums, stride, count, outputs)`, which adds the products of `count` columns
    of a panel of V registers with `outputs` rows of weights to running sums, whose lines are `stride` bytes apart."""
    names = ("*x", "*weights", "*sums", "stride", "count", "outputs")
    code = Code(module, isa, f"tiles_{vectors}", names, is_local=True)
    x, weights, sums, stride, count, outputs = code.arguments
    build, tile = code.build, _tile(isa, vectors)
    line, row = 4 * isa.lanes * vectors, _row_bytes(isa)

    def turn(w: Value, columns: int) -> Callable[[Value, list[Value]], list[Value]]:
        def add(k: Value, totals: list[Value]) -> list[Value]:
            words, registers = code.at(w, times(code, k, 4)), code.at(x, times(code, k, line))
            for n in range(columns):
                there = [register(code, code.at(registers, n * line), v) for v in range(vectors)]
                for r in range(tile):
                    word = code.splat(code.load(FLOAT, code.at(words, 4 * n + r * row), 4))
                    for v in range(vectors):
                        at = r * vectors + v
                        totals[at] = code.fma(word, there[v], totals[at])
            return totals

        return add

    def some(n: Value, _: list[Value]) -> list[Value]:
        w, to = code.at(weights, times(code, n, row)), code.at(sums, build.mul(n, stride))
        lines = [code.at(to, times(code, stride, r)) for r in range(tile)]
        totals = [register(code, each, v) for each in lines for v in range(vectors)]
        whole = build.and_(count, code.number(-_TURNS))
        totals = code.loop(code.number(0), whole, _TURNS, totals, turn(w, _TURNS))
        totals = code.loop(whole, count, 1, totals, turn(w, 1))
        for at, total in enumerate(totals):
            put(code, total, lines[at // vectors], at % vectors)
        return []

    code.loop(code.number(0), outputs, tile, [], some)
    code.end()


def _store(module: ir.Module, isa: Isa) -> None:
    """Add the function `store(given, sums, stride, bias, begin, end)`, which stores outputs `begin` to `end` - 1 of all
    rows, with the bias added and rounded to bf16. The rows that fill up the last register have the bits of the last
    row, and are stored in its place."""
    names = ("*given", "*sums", "stride", "*bias", "begin", "end")
    code = Code(module, isa, "store", names, is_local=True)
    given, sums, stride, bias, begin, end = code.arguments
    build, lanes = code.build, isa.lanes
    rows = code.load(LONG, given, 8)
    whole = build.add(begin, build.and_(build.sub(end, begin), code.number(-lanes)))

    def finished(totals: Value, row: Value, n: Value) -> None:
        place = times(code, n, 2)
        code.store(code.rounded(code.biased(totals, bias, place)), code.at(row, place))

    def registers(t: Value, _: list[Value]) -> list[Value]:
        each = [_row_address(code, given, build.add(t, code.number(r)), 1) for r in range(lanes)]

        def line(n: Value) -> Value:
            return code.at(code.at(sums, build.mul(build.sub(n, begin), stride)), times(code, t, 4))

        def some(n: Value, _: list[Value]) -> list[Value]:
            lines = [register(code, line(build.add(n, code.number(j))), 0) for j in range(lanes)]
            for row, totals in zip(each, code.transposed(lines), strict=True):
                finished(totals, row, n)
            return []

        def one(n: Value, _: list[Value]) -> list[Value]:
            totals = register(code, line(n), 0)
            for r, row in enumerate(each):
                finished(code.pick(totals, [r]), row, n)
            return []

        code.loop(begin, whole, lanes, [], some)
        code.loop(whole, end, 1, [], one)
        return []

    code.loop(code.number(0), rows, lanes, [], registers)
    code.end()


def _products(module: ir.Module, isa: Isa) -> None:
    """Add the main function `many_rows`."""
    code = Code(module, isa, PRODUCTS, ("*given", "*w", "*packed", "*bias", "begin", "end", "K"))
    given, w, packed, bias, begin, end, columns = code.arguments
    build, lanes, outputs = code.build, isa.lanes, code.build.sub(end, begin)
    registers = _registers_of(code, code.load(LONG, given, 8))
    stride, row = times(code, registers, 4 * lanes), times(code, columns, 2)
    sums, weights = code.scratch(times(code, stride, OUTPUTS)), code.scratch(code.number(OUTPUTS * _row_bytes(isa)))
    first = code.at(w, build.mul(begin, row))

    def clear(at: Value, _: list[Value]) -> list[Value]:
        put(code, code.reals(0.0), code.at(sums, at), 0)
        return []

    def part(k: Value, _: list[Value]) -> list[Value]:
        count = smaller(code, build.sub(columns, k), _part(isa))
        code.call("widen", [code.at(first, times(code, k, 2)), row, weights, count, outputs])

        def panel(v: Value, _: list[Value]) -> list[Value]:
            width = smaller(code, build.sub(registers, v), PANEL)
            place = build.add(build.mul(v, columns), build.mul(k, width))
            x, to = code.at(packed, times(code, place, 4 * lanes)), code.at(sums, times(code, v, 4 * lanes))
            for vectors in range(1, PANEL + 1):
                with build.if_then(build.icmp_signed("==", width, code.number(vectors))):
                    code.call(f"tiles_{vectors}", [x, weights, to, stride, count, outputs])
            return []

        code.loop(code.number(0), registers, PANEL, [], panel)
        return []

    code.loop(code.number(0), times(code, stride, OUTPUTS), 4 * lanes, [], clear)
    code.loop(code.number(0), columns, _part(isa), [], part)
    code.call("store", [given, sums, stride, bias, begin, end])
    code.end()
