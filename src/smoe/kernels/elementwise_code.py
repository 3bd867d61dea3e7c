"""Generates the machine code of `elementwise.py`: the gated activation and the weighted sum of experts' outputs.

Both functions round with integer arithmetic, because the conversion instruction flushes subnormal numbers to zero and
torch does not.
"""

from __future__ import annotations

from llvmlite import ir

from smoe.kernels.builder import Code, copies
from smoe.kernels.elementwise import LANES
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, LONG, Value


def add_gate(module: ir.Module, isa: Isa) -> None:
    """Add the function `gate(wide, table, inner, I, begin, end)`, which computes the outputs from `begin` to
    `end` - 1."""
    code = Code(module, isa, "gate", ("&wide", "&table", "&inner", "I", "begin", "end"), is_local=True)
    wide, table, inner, size, begin, end = code.arguments
    build = code.build

    def element(i: Value, _: list[Value]) -> list[Value]:
        at = code.element(wide, HALF_WORD, i)
        gate = build.zext(code.load(HALF_WORD, at, 2), LONG)
        active = code.load(HALF_WORD, code.element(table, HALF_WORD, gate), 2)
        up = code.load(HALF_WORD, code.element(at, HALF_WORD, size), 2)
        product = build.fmul(code.widened(active), code.widened(up))
        code.store(code.rounded(product), code.element(inner, HALF_WORD, i), 2)
        return []

    code.repeat(begin, end, 1, [], element)
    code.end()


def add_combine(module: ir.Module, isa: Isa) -> None:
    """Add the function `combine(rows, gains, out, count, H, begin, end)`, which computes the outputs from `begin` to
    `end` - 1, 16 at a time."""
    names = ("&rows", "&gains", "&out", "count", "H", "begin", "end")
    code = Code(module, isa, "combine", names, is_local=True)
    rows, gains, out, count, hidden, begin, end = code.arguments
    build, kind = code.build, code.registers(HALF_WORD, LANES)

    def strip(i: Value, _: list[Value]) -> list[Value]:
        def row(n: Value, total: list[Value]) -> list[Value]:
            place = build.add(build.mul(n, hidden), i)
            numbers = code.widened(code.load(kind, code.element(rows, HALF_WORD, place), 2))
            gain = code.splat(code.load(FLOAT, code.element(gains, FLOAT, n), 4), LANES)
            return [code.near(build.fadd(total[0], code.near(build.fmul(numbers, gain))))]

        (total,) = code.repeat(code.number(0), count, 1, [copies(code.registers(FLOAT, LANES), 0.0)], row)
        code.store(code.halved(total), code.element(out, HALF_WORD, i), 2)
        return []

    code.repeat(begin, end, LANES, [], strip)
    code.end()
