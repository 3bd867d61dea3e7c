"""The scores q . k of one query token with every key, as machine code for `attention.py`.

torch's order has four running sums per key, over the elements d = 0, 4, 8 ...; 1, 5, 9 ...; 2 ...; and 3 .... The score
is (s0 + s2) + (s1 + s3). Here keys are transposed in registers:

    memory: K, key by key                       registers: 8 x 8 groups of four d, transposed
    key n    | d0 .. d3 | d4 .. d7 | ...  ->    d0 .. d3    of keys n .. n+7      as d0, d2 and d1, d3 in float32
    key n+1  | d0 .. d3 | d4 .. d7 | ...        d4 .. d7    of keys n .. n+7

So a register has the running sums of eight keys, and keys are transposed once for all query heads that share them.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from smoe.kernels.attention import TILE
from smoe.kernels.builder import Code, copies
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import DOUBLE, FLOAT, HALF_WORD, LONG, WORD, Value

_KEYS = 8
"""The number of keys that are multiplied together."""
_AHEAD = 32
"""The number of keys that are prefetched into the second-level cache. 3000 keys and values then take 0.48 ms from
memory instead of 0.78."""


def halves_of(code: Code, packed: Value) -> tuple[Value, Value]:
    """Return 32 bf16 numbers of a key or value in float32: a register with the even elements, and one with the odd
    elements.

        packed     | d0 d1 | d2 d3 | d4 d5 | ...        two numbers in each 32 bits
        even       | d0 | d2 | d4 | ...                 shifted up
        odd        | d1 | d3 | d5 | ...                 lower halves cleared
    """
    return code.even_and_odd(code.build.bitcast(packed, code.registers(WORD, TILE // 2)))


def add_spread(module: ir.Module, isa: Isa) -> None:
    """Add a function that converts queries to float32. Of each four elements the order becomes 0, 2, 1, 3, as in the
    transposed keys."""
    code = Code(module, isa, "spread", ("&to", "&q", "stride", "size", "group"), is_local=True)
    to, q, stride, size, group = code.arguments
    build = code.build

    def head(h: Value, _: list[Value]) -> Sequence[Value]:
        source = code.element(q, HALF_WORD, build.mul(h, stride))
        own = code.element(to, FLOAT, build.mul(h, size))

        def four(d: Value, _: list[Value]) -> Sequence[Value]:
            wide = code.widened(code.load(code.registers(HALF_WORD, 4), code.element(source, HALF_WORD, d), 2))
            code.store(code.pick(wide, [0, 2, 1, 3]), code.element(own, FLOAT, d), 4)
            return ()

        code.repeat(code.number(0), size, 4, [], four)
        return ()

    code.repeat(code.number(0), group, 1, [], head)
    code.end()


def add_scores(module: ir.Module, isa: Isa, row: int) -> None:
    """Add a function that computes s[h, n] = q[h] . k[n], the scores of all keys for all query heads. `row`: the number
    of floats from one head's scores to the next head's.

    The loops are, from the outside: groups of 8 keys (the last key is repeated), tiles of 32 elements d, and heads.
    `pairs` [h, 2, 16] contains the running sums of a group of keys: s0 and s2 of each key, then s1 and s3. Between two
    groups `pairs` is zero.
    """
    names = ("&q", "&k", "stride", "n", "size", "group", "&pairs", "&s")
    code = Code(module, isa, "scores", names, is_local=True)
    q, k, stride, n, size, group, pairs, s = code.arguments
    build = code.build
    last, ahead = build.sub(n, code.number(1)), build.mul(stride, code.number(_AHEAD))

    def keys(g: Value, _: list[Value]) -> Sequence[Value]:
        rows = [
            code.element(k, HALF_WORD, build.mul(code.smaller(build.add(g, code.number(i)), last), stride))
            for i in range(_KEYS)
        ]

        def tile(d: Value, _: list[Value]) -> Sequence[Value]:
            addresses = [code.element(each, HALF_WORD, d) for each in rows]
            packed = [code.load(code.registers(LONG, 8), address, 2) for address in addresses]
            for address in addresses:
                code.prefetch(code.element(address, HALF_WORD, ahead))
            halves = [halves_of(code, fours) for fours in code.transposed(packed)]

            def head(h: Value, _: list[Value]) -> Sequence[Value]:
                pair, place = _pair(code, pairs, h), build.add(build.mul(h, size), d)
                _add_products(code, pair, code.element(q, FLOAT, place), halves)
                return ()

            code.repeat(code.number(0), group, 1, [], head)
            return ()

        def total(t: Value, _: list[Value]) -> Sequence[Value]:
            place = build.add(build.mul(t, code.number(row)), g)
            code.store(_total(code, _pair(code, pairs, t)), code.element(s, FLOAT, place), 4)
            return ()

        code.repeat(code.number(0), size, TILE, [], tile)
        code.repeat(code.number(0), group, 1, [], total)
        return ()

    code.repeat(code.number(0), n, _KEYS, [], keys)
    code.end()


def _pair(code: Code, pairs: Value, head: Value) -> tuple[Value, Value]:
    """Return the addresses of a head's two registers of running sums."""
    even = code.element(pairs, FLOAT, code.build.mul(head, code.number(32)))
    return even, code.element(even, FLOAT, 16)


def _add_products(code: Code, pair: tuple[Value, Value], q: Value, halves: Sequence[tuple[Value, Value]]) -> None:
    """Multiply a tile of all keys with the same tile of a query, and add the products to the running sums. Each step
    multiplies four elements d of all keys with the same four elements of the query."""
    build, kind = code.build, code.registers(FLOAT, 16)
    sums = [code.load(kind, at, 64) for at in pair]
    for j, keys in enumerate(halves):
        for odd, key in enumerate(keys):
            two = code.load(DOUBLE, code.element(q, FLOAT, 4 * j + 2 * odd), 4)
            sums[odd] = code.fma(key, build.bitcast(code.splat(two, 8), kind), sums[odd])
    for total, at in zip(sums, pair, strict=True):
        code.store(total, at, 64)


def _total(code: Code, pair: tuple[Value, Value]) -> Value:
    """Return eight scores from the running sums of a head, and reset the sums."""
    kind = code.registers(FLOAT, 16)
    even, odd = (code.load(kind, at, 64) for at in pair)
    for at in pair:
        code.store(copies(kind, 0.0), at, 64)
    return _added(code, *(code.pick(sums, range(lane, 16, 2)) for sums in (even, odd) for lane in (0, 1)))


def _added(code: Code, s0: Value, s2: Value, s1: Value, s3: Value) -> Value:
    return code.build.fadd(code.build.fadd(s0, s2), code.build.fadd(s1, s3))
