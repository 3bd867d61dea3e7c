"""The machine code of a softmax router after its product: from one row of logits to the chosen experts and their
weights.

    logits [E] -> softmax -> the K largest -> divided by their sum, if the model does so -> bf16

The code also completes the tasks of the chosen experts (`experts.py`): it writes the addresses of their matrices into
task fields, so no Python runs between a router and its experts.
"""

from __future__ import annotations

import functools
import math

from llvmlite import ir

from smoe.kernels.builder import Code, text_of
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, LONG, POINTER, WORD, Value

NAME, EACH = "choose_experts", "choose_experts_of_rows"
WORDS = ("logits", "padded", "top_k", "is_normalised", "candidates", "shares", "chosen", "weights", "ascending",
         "gains", "matrices", "matrices_each", "places", "places_count")  # fmt: skip
"""The names of the 8-byte words at the address `arguments`:

    logits                      address of bf16 [padded], the router's product; entries after the last expert are -inf
    padded                      the number of experts, rounded up to whole registers
    top_k, is_normalised        K; 1 if the K weights are divided by their sum, else 0
    candidates, shares          addresses of scratch memory, float32 [padded] each
    chosen, weights             addresses of the results in transformers' order: int64 [K] and bf16 [K]
    ascending, gains            addresses of the results by ascending expert: int64 [K] and float32 [K]
    matrices, matrices_each     address of int64 [E, M], the addresses of each expert's M matrices; M
    places, places_count        address of int64 [n, 3], (address of a field, i, m): the field receives the address
                                of matrix m of the i-th chosen expert in ascending order; n, which may be 0
"""
ROW_WORDS = ("logits", "experts", "top_k", "is_normalised", "chosen", "weights", "rows", "step")
"""The names of the words for several rows: addresses of bf16 [rows, experts], the number of experts, which whole
registers hold, K and normalization as above, addresses of the results int64 [rows, K] and bf16 [rows, K], the number of
rows, and the number of rows per unit."""
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(8))
_LEAST = -87.0
"""The smallest argument of exp whose result is a normal float32. Smaller arguments are replaced by it, which changes no
sum."""


def module_of(isa: Isa) -> str:
    """Return the LLVM text of the functions `choose_experts(arguments, unit)` and `choose_experts_of_rows(arguments,
    unit)`."""
    module = ir.Module()
    code = Code(module, isa, NAME, ("*arguments", "unit"))
    word = code.given(code.arguments[0], WORDS)
    at = {name: code.pointer(value) for name, value in word.items()}
    total = _softmax(code, at["logits"], at["candidates"], at["shares"], word["padded"])
    _choose(code, word, at, total)
    _in_ascending_order(code, word["top_k"], at)
    _complete_tasks(code, word, at)
    code.end()
    _add_rows(module, isa)
    return text_of(module, isa.attributes)


def _add_rows(module: ir.Module, isa: Isa) -> None:
    """Add the function that chooses the experts of `step` rows."""
    code = Code(module, isa, EACH, ("*arguments", "unit"))
    arguments, unit = code.arguments
    build, given = code.build, code.given(arguments, ROW_WORDS)
    experts, top_k, zero = given["experts"], given["top_k"], code.number(0)
    of_row = code.scratch(code.number(len(WORDS)), LONG)
    numbers, places = (code.scratch(build.mul(code.number(2), count), LONG) for count in (experts, top_k))
    same = {"padded": experts, "top_k": top_k, "is_normalised": given["is_normalised"], "matrices": zero}
    same |= {"matrices_each": zero, "places": zero, "places_count": zero}
    same |= {"candidates": numbers, "shares": code.element(numbers, LONG, experts)}
    same |= {"ascending": places, "gains": code.element(places, LONG, top_k)}

    def put(name: str, value: Value) -> None:
        number = build.ptrtoint(value, LONG) if value.type == POINTER else value
        code.store(number, code.element(of_row, LONG, WORDS.index(name)), 8)

    for name, value in same.items():
        put(name, value)
    widths = {"logits": build.mul(experts, code.number(2)), "chosen": build.mul(top_k, code.number(8))}
    widths |= {"weights": build.mul(top_k, code.number(2))}

    def row(n: Value, _: list[Value]) -> list[Value]:
        for name, width in widths.items():
            put(name, build.add(given[name], build.mul(n, width)))
        code.call(NAME, [of_row, zero])
        return []

    begin = build.mul(unit, given["step"])
    code.loop(begin, code.smaller(build.add(begin, given["step"]), given["rows"]), 1, [], row)
    code.end()


def _place(code: Code, base: Value, index: Value, width: int) -> Value:
    """Return the address of entry number `index` of an array. Each entry has `width` bytes."""
    return code.at(base, code.build.mul(index, code.number(width)))


def _softmax(code: Code, logits: Value, candidates: Value, shares: Value, count: Value) -> Value:
    """Write the logits as float32 to `candidates`, and exp(logit - largest logit) to `shares`. Return the sum of the
    values in `shares`."""
    build, lanes = code.build, code.isa.lanes
    zero, lowest = code.number(0), code.reals(float("-inf"))

    def widen(i: Value, carried: list[Value]) -> list[Value]:
        numbers = code.widened(code.load(code.registers(HALF_WORD), _place(code, logits, i, 2)))
        code.store(numbers, _place(code, candidates, i, 4))
        return [build.select(build.fcmp_ordered(">", numbers, carried[0]), numbers, carried[0])]

    (largest,) = code.loop(zero, count, lanes, [lowest], widen)
    top = code.splat(_largest(code, largest))

    def exponentials(i: Value, carried: list[Value]) -> list[Value]:
        numbers = code.load(code.registers(FLOAT), _place(code, candidates, i, 4))
        powers = _exp(code, build.fsub(numbers, top))
        code.store(powers, _place(code, shares, i, 4))
        return [build.fadd(carried[0], powers)]

    (sums,) = code.loop(zero, count, lanes, [code.reals(0.0)], exponentials)
    return code.summed(sums)


def _largest(code: Code, register: Value) -> Value:
    while register.type.count > 1:
        half = register.type.count // 2
        low, high = code.pick(register, list(range(half))), code.pick(register, list(range(half, 2 * half)))
        register = code.build.select(code.build.fcmp_ordered(">", low, high), low, high)
    return code.build.extract_element(register, ir.Constant(WORD, 0))


def _exp(code: Code, x: Value) -> Value:
    """Return exp of a register of numbers up to 0. It is 2^n * e^r with |r| <= ln(2) / 2, where e^r is computed by its
    Taylor series."""
    build = code.build
    least = code.reals(_LEAST)
    x = build.select(build.fcmp_ordered("<", x, least), least, x)  # NaN stays NaN, and makes all weights NaN
    n = code.nearest(build.fmul(x, code.reals(1 / math.log(2))))
    whole = build.sitofp(n, code.registers(FLOAT))
    r = code.fma(whole, code.reals(-_LN2_HIGH), x)
    r = code.fma(whole, code.reals(-_LN2_LOW), r)
    total = code.reals(_TAYLOR[-1])
    for factor in reversed(_TAYLOR[:-1]):
        total = code.fma(total, r, code.reals(factor))
    exponent = build.shl(build.add(n, code.words([127] * code.isa.lanes)), code.words([23] * code.isa.lanes))
    return build.fmul(total, build.bitcast(exponent, code.registers(FLOAT)))


def _choose(code: Code, word: dict[str, Value], at: dict[str, Value], total: Value) -> None:
    """Write the K experts with the largest logits, and their weights. Of experts with equal logits, the first is
    chosen."""
    build = code.build
    zero = code.number(0)

    def best(i: Value, carried: list[Value]) -> list[Value]:
        value = code.load(FLOAT, _place(code, at["candidates"], i, 4), 4)
        is_first_nan = build.and_(
            build.fcmp_unordered("uno", value, value), build.fcmp_ordered("ord", carried[0], carried[0])
        )  # which counts as the largest, as in torch
        is_better = build.or_(build.fcmp_ordered(">", value, carried[0]), is_first_nan)
        return [build.select(is_better, value, carried[0]), build.select(is_better, i, carried[1])]

    def choose(k: Value, carried: list[Value]) -> list[Value]:
        _, expert = code.loop(zero, word["padded"], 1, [ir.Constant(FLOAT, float("-inf")), zero], best)
        code.store(ir.Constant(FLOAT, float("-inf")), _place(code, at["candidates"], expert, 4), 4)
        code.store(expert, _place(code, at["chosen"], k, 8), 8)
        share = build.fdiv(code.load(FLOAT, _place(code, at["shares"], expert, 4), 4), total)
        code.store(share, _place(code, at["gains"], k, 4), 4)
        return [build.fadd(carried[0], share)]

    (sum_of_chosen,) = code.loop(zero, word["top_k"], 1, [ir.Constant(FLOAT, 0.0)], choose)
    is_normalised = build.icmp_signed("!=", word["is_normalised"], zero)
    divisor = build.select(is_normalised, sum_of_chosen, ir.Constant(FLOAT, 1.0))

    def divide(k: Value, _: list[Value]) -> list[Value]:
        weight = build.fdiv(code.load(FLOAT, _place(code, at["gains"], k, 4), 4), divisor)
        code.store(code.rounded(code.splat(weight, 1)), _place(code, at["weights"], k, 2), 2)
        return []

    code.loop(zero, word["top_k"], 1, [], divide)


def _in_ascending_order(code: Code, top_k: Value, at: dict[str, Value]) -> None:
    """Write the chosen experts and their weights in ascending order of experts. The index of an expert is the number of
    smaller chosen experts."""
    build, zero = code.build, code.number(0)

    def place(k: Value, _: list[Value]) -> list[Value]:
        expert = code.load(LONG, _place(code, at["chosen"], k, 8), 8)

        def before(other: Value, carried: list[Value]) -> list[Value]:
            theirs = code.load(LONG, _place(code, at["chosen"], other, 8), 8)
            is_first = build.and_(build.icmp_signed("==", theirs, expert), build.icmp_signed("<", other, k))
            comes_before = build.or_(build.icmp_signed("<", theirs, expert), is_first)
            return [build.add(carried[0], build.zext(comes_before, LONG))]

        (rank,) = code.loop(zero, top_k, 1, [zero], before)
        code.store(expert, _place(code, at["ascending"], rank, 8), 8)
        weight = code.widened(code.load(code.registers(HALF_WORD, 1), _place(code, at["weights"], k, 2), 2))
        code.store(weight, _place(code, at["gains"], rank, 4), 4)
        return []

    code.loop(zero, top_k, 1, [], place)


def _complete_tasks(code: Code, word: dict[str, Value], at: dict[str, Value]) -> None:
    """Write the addresses of the chosen experts' matrices into the fields of their tasks."""
    code.loop(code.number(0), word["places_count"], 1, [], functools.partial(_complete, code, word, at))


def _complete(code: Code, word: dict[str, Value], at: dict[str, Value], i: Value, _: list[Value]) -> list[Value]:
    build, place = code.build, _place(code, at["places"], i, 24)
    field, n, m = (code.load(LONG, code.at(place, offset), 8) for offset in (0, 8, 16))
    expert = code.load(LONG, _place(code, at["ascending"], n, 8), 8)
    entry = build.add(build.mul(expert, word["matrices_each"]), m)
    address = code.load(LONG, _place(code, at["matrices"], entry, 8), 8)
    code.store(address, build.inttoptr(field, POINTER), 8)
    return []
