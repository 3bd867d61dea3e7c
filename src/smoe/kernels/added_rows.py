"""A kernel that adds weighted rows to float32 totals: the sum over the experts of a prompt.

total [H] += gain * row [H]        one row after the other, in the order of the list, on any number of threads
"""

from __future__ import annotations

import functools

from llvmlite import ir

from smoe.kernels.builder import Code, text_of
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, LONG, POINTER, Value

NAME = "add_rows"


def module_of(isa: Isa) -> str:
    """Return the LLVM text of the function `add_rows(given, gains, -, -, begin, end, H)`.

    The function computes the columns from `begin` to `end` - 1 of every total; their number is a multiple of the lanes
    of a register. `given` contains the number of rows, then for each row two addresses: that of the row (bf16 [H]) and
    that of its total (float32 [H]). `gains` are float32, one per row.
    """
    module = ir.Module()
    code = Code(module, isa, NAME, ("*given", "*gains", "*-", "*--", "begin", "end", "H"))
    given, gains, _, _, begin, end, _ = code.arguments
    rows = code.load(LONG, given)
    code.loop(code.number(0), rows, 1, [], functools.partial(_row, code, given, gains, begin, end))
    code.end()
    return text_of(module, isa.attributes)


def _row(code: Code, given: Value, gains: Value, begin: Value, end: Value, n: Value, _: list[Value]) -> list[Value]:
    build, lanes = code.build, code.isa.lanes
    place = build.mul(n, code.number(16))
    row, total = (code.load(POINTER, code.at(given, build.add(place, code.number(at)))) for at in (8, 16))
    gain = code.splat(code.load(FLOAT, code.at(gains, build.mul(n, code.number(4))), 4))

    def some(i: Value, _: list[Value]) -> list[Value]:
        numbers = code.widened(code.load(code.registers(HALF_WORD), code.at(row, build.mul(i, code.number(2)))))
        to = code.at(total, build.mul(i, code.number(4)))
        code.store(code.fma(gain, numbers, code.load(code.registers(FLOAT), to, 4)), to, 4)
        return []

    code.loop(begin, end, lanes, [], some)
    return []
