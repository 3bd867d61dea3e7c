"""Generates the machine code of `norm.py`: RMSNorm of rows in bf16, with torch's order of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from smoe.kernels.builder import Code, copies, text_of
from smoe.kernels.isa import AVX512, Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, Value
from smoe.kernels.norm import LANES

_SUM_LANES = 8
_ACCUMULATORS = 4
_ROUND = 16
"""The number of registers after which an accumulator is reset."""
_TOGETHER = _ACCUMULATORS * _SUM_LANES


def module_of(isa: Isa = AVX512) -> str:
    """Return the LLVM text of `rms_norm(x, weight, out, rows, size, epsilon)` and `rms_norm_around_zero`."""
    module = ir.Module()
    add_functions(module, isa)
    _add_weigh(module, isa, "weigh_around_zero", _around_zero)
    _add_norm(module, isa, "rms_norm_around_zero", "weigh_around_zero")
    return text_of(module, isa.attributes)


def add_functions(module: ir.Module, isa: Isa) -> None:
    """Add the function `rms_norm` to a module."""
    _add_mean_of_squares(module, isa)
    _add_weigh(module, isa, "weigh", _usual)
    _add_norm(module, isa, "rms_norm", "weigh")


def _add_norm(module: ir.Module, isa: Isa, name: str, weigh: str) -> None:
    """Add a function that computes the norm of rows, whose numbers the function `weigh` multiplies."""
    code = Code(module, isa, name, ("*x", "*weight", "*out", "rows", "size", ".eps"))
    x, weight, out, rows, size, eps = code.arguments
    build = code.build

    def row(n: Value, _: list[Value]) -> list[Value]:
        offset = build.mul(n, size)
        source, to = code.element(x, HALF_WORD, offset), code.element(out, HALF_WORD, offset)
        variance = build.fadd(code.call("mean_of_squares", [source, size]), eps)
        deviation = code.intrinsic("llvm.sqrt.f32", ir.FunctionType(FLOAT, [FLOAT]), [variance])
        scale = build.fdiv(copies(FLOAT, 1.0), deviation)
        code.call(weigh, [source, weight, to, size, scale])
        return []

    code.repeat(code.number(0), rows, 1, [], row)
    code.end()


def _add_mean_of_squares(module: ir.Module, isa: Isa) -> None:
    """Add a function that computes the mean of squares in torch's order. `low` are the accumulators, `high` the sums to
    which they are added."""
    code = Code(module, isa, "mean_of_squares", ("&x", "size"), is_local=True, returns=FLOAT)
    x, size = code.arguments
    build, kind = code.build, code.registers(FLOAT, _SUM_LANES)
    whole = build.and_(size, code.number(-_TOGETHER))

    def square(i: Value) -> Value:
        halves = code.load(code.registers(HALF_WORD, _SUM_LANES), code.element(x, HALF_WORD, i), 2)
        numbers = code.widened(halves)
        return build.fmul(numbers, numbers)

    def together(i: Value, sums: list[Value]) -> list[Value]:
        places = [build.add(i, code.number(k * _SUM_LANES)) for k in range(_ACCUMULATORS)]
        squares = [square(place) for place in places]
        following = build.add(i, code.number(_TOGETHER))
        in_round = build.and_(following, code.number(_ROUND * _TOGETHER - 1))
        is_round = build.icmp_signed("==", in_round, code.number(0))
        lows, highs = list[Value](), list[Value]()
        for low, high, added in zip(sums[:_ACCUMULATORS], sums[_ACCUMULATORS:], squares, strict=True):
            more = build.fadd(low, added)
            moved = build.fadd(high, more)
            lows.append(build.select(is_round, copies(kind, 0.0), more))
            highs.append(build.select(is_round, moved, high))
        return [*lows, *highs]

    nothing = [copies(kind, 0.0)] * (2 * _ACCUMULATORS)
    sums = code.repeat(code.number(0), whole, _TOGETHER, nothing, together, may_be_empty=True)
    parts = [build.fadd(high, low) for low, high in zip(sums[:_ACCUMULATORS], sums[_ACCUMULATORS:], strict=True)]
    (total,) = code.loop(whole, size, _SUM_LANES, parts[:1], lambda i, first: [build.fadd(first[0], square(i))])
    code.end(_mean(code, _summed(code, total, parts[1:]), size))


def _summed(code: Code, total: Value, others: Sequence[Value]) -> Value:
    """Return the sum of all numbers in registers: the registers are added in their order, and then the lanes."""
    for other in others:
        total = code.build.fadd(total, other)
    adding = ir.FunctionType(FLOAT, [FLOAT, total.type])
    return code.intrinsic(f"llvm.vector.reduce.fadd.v{_SUM_LANES}f32", adding, [copies(FLOAT, 0.0), total])


def _mean(code: Code, total: Value, count: Value) -> Value:
    return code.build.fdiv(total, code.build.sitofp(count, FLOAT))


def _add_weigh(module: ir.Module, isa: Isa, name: str, weighted: Callable[[Code, Value, Value, Value], Value]) -> None:
    """Add a function that multiplies numbers by their row's scale and their weights, and rounds the results to bf16."""
    code = Code(module, isa, name, ("&x", "&weight", "&out", "size", ".scale"), is_local=True)
    x, weight, out, size, scale = code.arguments
    kind, scales = code.registers(HALF_WORD, LANES), code.splat(scale, LANES)

    def strip(i: Value, _: list[Value]) -> list[Value]:
        numbers, weights = (code.widened(code.load(kind, code.element(each, HALF_WORD, i), 2)) for each in (x, weight))
        code.store(code.rounded(weighted(code, numbers, weights, scales)), code.element(out, HALF_WORD, i), 2)
        return []

    code.repeat(code.number(0), size, LANES, [], strip)
    code.end()


def _usual(code: Code, numbers: Value, weights: Value, scales: Value) -> Value:
    return code.build.fmul(weights, code.near(code.build.fmul(numbers, scales)))


def _around_zero(code: Code, numbers: Value, weights: Value, scales: Value) -> Value:
    ones = copies(weights.type, 1.0)
    return code.build.fmul(code.build.fmul(numbers, scales), code.build.fadd(ones, weights))
