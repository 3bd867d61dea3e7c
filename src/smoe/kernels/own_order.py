"""Products of rows with bf16 matrices in our own order of sums, for CPUs on which torch's order is slow.

torch's order (`row_product.py`) requires AVX-512 BF16. On other CPUs, computing its bits takes at least twice the time
of reading the weights. Here each output is summed in as many chains as suit the instruction set:

    weights in memory    k k+1 | k+2 k+3 | ...    32 bits hold two numbers: the even one shifted up, and the odd
                                                  one with its lower half cleared, are float32 numbers already
    x, converted once    even | odd
    output n    =    all lanes of  sum over k of  even(w) * even(x)    +    all lanes of  sum over k of  odd(w) * odd(x)

A product of two bf16 numbers is exact in float32, so only the sums are rounded. Their order depends on shape, number of
rows and instruction set (grade E1). When a model is loaded, their error is compared with torch's (`proof.py`). The
functions have the same arguments as those of `quantised.py`, so callers need not distinguish them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from llvmlite import ir

from smoe.kernels.builder import Code, text_of
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, POINTER, WORD, Value

AHEAD = 8192
"""The distance between computation and prefetch, in bytes."""
LINE = 64
_LINES = 2
"""The number of cache lines that one iteration of the loop over rows handles."""
_CHAINS = 8
"""The number of running sums of all products together. With fewer, an addition would have to wait for the one before
it."""
_ARGUMENTS = ("*given", "*w", "*out", "*bias", "begin", "end", "K")


def products_name(rows: int) -> str:
    """Return the name of the function that multiplies `rows` activation rows with a bf16 matrix."""
    return f"products_bf16_{rows}"


def module_of(isa: Isa, prefetches: bool = True) -> str:
    """Return the LLVM text of the functions `products_bf16_1`, `_2` and `_4`. K must be a multiple of 32.

    `prefetches`: prefetch the weights. Otherwise the CPU does (`isa.cpu_prefetches_rows`), and one activation row is
    multiplied with two distant rows of the matrix at a time, one from each half of the outputs: two streams keep more
    cache lines in flight.
    """
    module = ir.Module()
    for rows in (1, 2, 4):
        _products(module, isa, rows, AHEAD if prefetches else None)
    return text_of(module, isa.attributes)


def _products(module: ir.Module, isa: Isa, rows: int, ahead: int | None) -> None:
    """Add the function that multiplies `rows` activation rows with a bf16 matrix to a module. `ahead`: the distance
    between computation and prefetch, in bytes."""
    code = Code(module, isa, products_name(rows), _ARGUMENTS)
    given, w, out, bias, begin, end, columns = code.arguments
    build = code.build
    if rows == 1:
        xs, outs = [given], [out]
    else:
        xs = [code.load(POINTER, code.at(given, 16 * r)) for r in range(rows)]
        outs = [code.load(POINTER, code.at(given, 16 * r + 8)) for r in range(rows)]
    xs = xs if isa.has_bf16_dots else [_halved(code, x, columns) for x in xs]
    streams = 2 if rows == 1 and ahead is None else 1
    apart = build.sdiv(build.add(build.sub(end, begin), code.number(streams - 1)), code.number(streams))
    last = build.sub(end, code.number(1))

    def together(n: Value, _: list[Value]) -> list[Value]:
        # the last one of an odd number is computed twice
        each = [n] if streams == 1 else [n, code.smaller(build.add(n, apart), last)]
        places = [build.mul(n, code.number(2)) for n in each]
        totals = _dots(code, [code.at(w, build.mul(place, columns)) for place in places], xs, columns, ahead)
        for place, of_xs in zip(places, totals, strict=True):
            for total, to in zip(of_xs, outs, strict=True):
                one = code.splat(total, 1)
                code.store(code.rounded(one if rows > 1 else code.biased(one, bias, place)), code.at(to, place))
        return []

    code.loop(begin, build.add(begin, apart), 1, [], together)
    code.end()


def _halved(code: Code, x: Value, columns: Value) -> Value:
    """Return the address of a bf16 row converted to float32, in which registers of even elements and of odd elements
    alternate."""
    build, lanes = code.build, code.isa.lanes
    scratch = code.scratch(build.mul(columns, code.number(4)))

    def piece(k: Value, _: list[Value]) -> list[Value]:
        pairs = code.load(code.registers(WORD), code.at(x, build.mul(k, code.number(2))))
        place = code.at(scratch, build.mul(k, code.number(4)))
        for n, half in enumerate(code.even_and_odd(pairs)):
            code.store(half, code.at(place, 4 * lanes * n))
        return []

    code.loop(code.number(0), columns, 2 * lanes, [], piece)
    return scratch


def _dots(
    code: Code, rows: Sequence[Value], xs: Sequence[Value], columns: Value, ahead: int | None
) -> list[list[Value]]:
    """Return, for each row of the matrix, its products with every activation row x."""
    build, pairs = code.build, [(row, x) for row in rows for x in xs]
    per_pair = _CHAINS // len(pairs)
    add = _add_pairs if code.isa.has_bf16_dots else _add_halves

    def lines(count: int) -> Callable[[Value, list[Value]], list[Value]]:
        def turn(k: Value, carried: list[Value]) -> list[Value]:
            sums = [carried[n : n + per_pair] for n in range(0, len(carried), per_pair)]
            at = build.mul(k, code.number(2))
            if ahead is not None:
                for row, line in product(rows, range(0, count * LINE, LINE)):
                    code.prefetch(code.at(code.at(row, at), ahead + line), is_read_once=True)
            for n, begin in enumerate(range(0, count * LINE, 4 * code.isa.lanes)):
                place = build.add(at, code.number(begin))
                for m, row in enumerate(rows):
                    add(code, n, code.at(row, place), xs, place, sums[m * len(xs) : (m + 1) * len(xs)])
            return [each for some in sums for each in some]

        return turn

    carried = [code.reals(0.0)] * (per_pair * len(pairs))
    at_once = _LINES // len(rows)
    whole = build.and_(columns, code.number(-(at_once * LINE // 2)))
    carried = code.loop(code.number(0), whole, at_once * LINE // 2, carried, lines(at_once))
    if at_once > 1:
        carried = code.loop(whole, columns, LINE // 2, carried, lines(1))
    totals = [_total(code, carried[n : n + per_pair]) for n in range(0, len(carried), per_pair)]
    return [totals[n : n + len(xs)] for n in range(0, len(totals), len(xs))]


def _add_pairs(code: Code, n: int, weights: Value, xs: Sequence[Value], at: Value, sums: list[list[Value]]) -> None:
    """Multiply register number `n` of an iteration with every row of x, by bf16 dot products, and add the products to
    `sums`."""
    kind = code.registers(HALF_WORD, 2 * code.isa.lanes)
    loaded = code.load(kind, weights)
    for x, chains in zip(xs, sums, strict=True):
        chain = n % len(chains)
        chains[chain] = code.dots(chains[chain], loaded, code.load(kind, code.at(x, at)))


def _add_halves(code: Code, n: int, weights: Value, xs: Sequence[Value], at: Value, sums: list[list[Value]]) -> None:
    """Multiply register number `n` of an iteration with every row of x in float32, even and odd elements separately,
    and add the products to `sums`."""
    kind, at = code.registers(FLOAT), code.build.mul(at, code.number(2))
    for half, numbers in enumerate(code.even_and_odd(code.load(code.registers(WORD), weights))):
        for x, chains in zip(xs, sums, strict=True):
            chain = (2 * n + half) % len(chains)
            place = code.at(code.at(x, at), 4 * code.isa.lanes * half)
            chains[chain] = code.fma(numbers, code.load(kind, place), chains[chain])


def _total(code: Code, chains: Sequence[Value]) -> Value:
    """Return the sum of all lanes of all running sums, for one output."""
    while len(chains) > 1:
        half = len(chains) // 2
        chains = [code.build.fadd(a, b) for a, b in zip(chains[:half], chains[half:], strict=True)]
    return code.summed(chains[0])
