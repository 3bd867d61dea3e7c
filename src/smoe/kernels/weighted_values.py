"""The values weighted by a query's softmax, p . v, as machine code for `attention.py`.

torch's order of sums: p is rounded to bf16. For four keys at a time, an output adds ((p0 * v0 + p2 * v2) + (p1 * v1 +
p3 * v3)). One to three keys may remain; they are added one at a time, the last key first. Outputs are in float32 until
all keys have been added. Outputs are computed in tiles of 32 elements: 16 of even index, then 16 of odd index,
because the registers hold the values in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from smoe.kernels.attention import TILE
from smoe.kernels.builder import Code, copies
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, LONG, WORD, Value
from smoe.kernels.scores import halves_of

_LANES = 16
_AHEAD = 16
"""The number of values that are prefetched into the second-level cache (measurements in `scores.py`)."""


def add_weigh(module: ir.Module, isa: Isa, row: int) -> None:
    """Add a function that computes totals[h] += p[h, n] * v[n]: four keys at a time, then the remaining ones from the
    last on; in tiles of 32 elements d, and then heads. `row`: the number of floats from one head's weights to the next
    head's."""
    names = ("&p", "&v", "stride", "n", "size", "group", "&totals")
    code = Code(module, isa, "weigh", names, is_local=True)
    p, v, stride, n, size, group, totals = code.arguments
    build = code.build
    whole, ahead = build.and_(n, code.number(-4)), build.mul(stride, code.number(_AHEAD))

    def add(key: Value, rows: Sequence[Value], is_ahead: bool, added: _Added) -> None:
        """Add as many keys as there are `rows` of values, from number `key` on, to the totals of all heads."""

        def tile(d: Value, _: list[Value]) -> Sequence[Value]:
            addresses = [code.element(each, HALF_WORD, d) for each in rows]
            values = [halves_of(code, code.load(code.registers(LONG, 8), address, 2)) for address in addresses]
            for address in addresses if is_ahead else ():
                code.prefetch(code.element(address, HALF_WORD, ahead))

            def head(h: Value, _: list[Value]) -> Sequence[Value]:
                place = code.element(p, FLOAT, build.add(build.mul(h, code.number(row)), key))
                weights = [
                    code.splat(code.load(FLOAT, code.element(place, FLOAT, i), 4), _LANES) for i in range(len(rows))
                ]
                for at, old, each in zip(*_totals(code, totals, h, size, d), zip(*values, strict=True), strict=True):
                    code.store(added(code, old, weights, each), at, 64)
                return ()

            code.repeat(code.number(0), group, 1, [], head)
            return ()

        code.repeat(code.number(0), size, TILE, [], tile)

    def four(k: Value, _: list[Value]) -> Sequence[Value]:
        rows = [code.element(v, HALF_WORD, build.mul(k, stride))]
        for _number in range(3):
            rows.append(code.element(rows[-1], HALF_WORD, stride))
        add(k, rows, True, _with_four)
        return ()

    def one(key: Value) -> None:
        add(key, [code.element(v, HALF_WORD, build.mul(key, stride))], False, _with_one)

    code.repeat(code.number(0), whole, 4, [], four, may_be_empty=True)
    _from_last(code, whole, n, one)
    code.end()


def _from_last(code: Code, begin: Value, end: Value, body: Callable[[Value], None]) -> None:
    """Build a loop over the keys from `end` - 1 down to `begin`."""

    def turn(after: list[Value]) -> Sequence[Value]:
        key = code.build.sub(after[0], code.number(1))
        body(key)
        return [key]

    code.loop_while([end], lambda after: code.build.icmp_signed(">", after[0], begin), turn)


_Added = Callable[[Code, Value, Sequence[Value], Sequence[Value]], Value]
"""A function that returns totals to which weighted values are added: (totals, weights, values)."""


def _with_four(code: Code, old: Value, p: Sequence[Value], v: Sequence[Value]) -> Value:
    build = code.build
    even, odd = (code.fma(p[n + 2], v[n + 2], build.fmul(p[n], v[n])) for n in (0, 1))
    return build.fadd(old, build.fadd(even, odd))


def _with_one(code: Code, old: Value, p: Sequence[Value], v: Sequence[Value]) -> Value:
    return code.fma(p[0], v[0], old)


def _totals(code: Code, totals: Value, head: Value, size: Value, d: Value) -> tuple[list[Value], list[Value]]:
    """Return the addresses of a tile's two registers of totals, and the registers."""
    even = code.element(totals, FLOAT, code.build.add(code.build.mul(head, size), d))
    addresses = [even, code.element(even, FLOAT, _LANES)]
    return addresses, [code.load(code.registers(FLOAT, _LANES), at, 64) for at in addresses]


def add_finish(module: ir.Module, isa: Isa) -> None:
    """Add a function that computes out[h] = totals[h] times the reciprocal of the sum of weights, in bf16 and in the
    order of the elements d."""
    code = Code(module, isa, "finish", ("&out", "&totals", "&state", "size", "group"), is_local=True)
    out, totals, state, size, group = code.arguments
    build, kind = code.build, code.registers(WORD, _LANES)

    def head(h: Value, _: list[Value]) -> Sequence[Value]:
        place = build.add(build.mul(h, code.number(2)), code.number(1))
        divided = _divided_by(code, code.load(FLOAT, code.element(state, FLOAT, place), 4))

        def tile(d: Value, _: list[Value]) -> Sequence[Value]:
            _, found = _totals(code, totals, h, size, d)
            products = [build.bitcast(each, kind) for each in [divided(each) for each in found]]
            even, odd = (code.near_bits(each) for each in products)
            both = build.or_(build.lshr(even, copies(kind, 16)), odd)
            code.store(both, code.element(out, HALF_WORD, build.add(build.mul(h, size), d)), 2)
            return ()

        code.repeat(code.number(0), size, TILE, [], tile)
        return ()

    code.repeat(code.number(0), group, 1, [], head)
    code.end()


def _divided_by(code: Code, total: Value) -> Callable[[Value], Value]:
    """Return a function that multiplies a register by the reciprocal of a number."""
    reciprocal = code.splat(code.build.fdiv(copies(FLOAT, 1.0), total), _LANES)
    return lambda register: code.build.fmul(register, reciprocal)
