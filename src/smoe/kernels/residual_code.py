"""Generates the machine code of `residual.py`: sums and norms of rows."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from smoe.kernels.builder import Code, text_of
from smoe.kernels.isa import AVX512, Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, Value
from smoe.kernels.norm import LANES
from smoe.kernels.norm_code import add_functions

NAME = "add_and_norm"
WORDS = ("x", "y", "totals", "out", "weight", "normed", "rows", "size", "step", "eps")
"""The names of the 8-byte words at the address `arguments`:

    x, y, totals       addresses of bf16 [rows, size], bf16 [rows, size] and float32 [rows, size]; y and totals may be 0
    out                address of bf16 [rows, size]; out is x if y and totals are 0
    weight, normed     addresses of bf16 [size] and bf16 [rows, size]; both 0: without a norm
    rows, size, step   the number of rows, of columns, and of rows per unit
    eps                the bits of the norm's epsilon
"""


def module_of(isa: Isa = AVX512) -> str:
    """Return the LLVM text of the function `add_and_norm(arguments, unit)`."""
    module = ir.Module()
    add_functions(module, isa)
    code = Code(module, isa, NAME, ("*arguments", "unit"))
    arguments, unit = code.arguments
    build, given, zero = code.build, code.given(arguments, WORDS), code.number(0)
    eps, size = code.real(given["eps"]), given["size"]

    def place(name: str, n: Value, width: int = 2) -> Value:
        """Return the address of row number `n`."""
        return code.pointer(build.add(given[name], build.mul(build.mul(n, size), code.number(width))))

    def add(n: Value, addend: Callable[[Value], Value]) -> list[Value]:
        kind = code.registers(HALF_WORD, LANES)

        def strip(i: Value, _: list[Value]) -> list[Value]:
            numbers = code.widened(code.load(kind, code.element(place("x", n), HALF_WORD, i), 2))
            total = code.rounded(build.fadd(numbers, addend(i)))
            code.store(total, code.element(place("out", n), HALF_WORD, i), 2)
            return []

        code.repeat(zero, size, LANES, [], strip)
        return []

    def row(n: Value, _: list[Value]) -> list[Value]:
        def of_rows(i: Value) -> Value:
            kind = code.registers(HALF_WORD, LANES)
            return code.widened(code.load(kind, code.element(place("y", n), HALF_WORD, i), 2))

        def of_totals(i: Value) -> Value:
            numbers = code.load(code.registers(FLOAT, LANES), code.element(place("totals", n, 4), FLOAT, i), 4)
            return code.near(numbers)

        def norm() -> list[Value]:
            one = code.number(1)
            code.call("rms_norm", [place("out", n), code.pointer(given["weight"]), place("normed", n), one, size, eps])
            return []

        code.either(build.icmp_signed("!=", given["y"], zero), (), lambda: add(n, of_rows))
        code.either(build.icmp_signed("!=", given["totals"], zero), (), lambda: add(n, of_totals))
        code.either(build.icmp_signed("!=", given["weight"], zero), (), norm)
        return []

    begin = build.mul(unit, given["step"])
    code.loop(begin, code.smaller(build.add(begin, given["step"]), given["rows"]), 1, [], row)
    code.end()
    return text_of(module, isa.attributes)
