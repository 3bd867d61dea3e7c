"""The softmax of a block of scores with the bits of torch's CPU attention, as machine code for `attention.py`.

Scores become exp(score - maximum), rounded to bf16: by a polynomial in whole registers of 16, and by libm's expf for
the remaining ones. Their sum, which is taken before rounding, uses two alternating running sums of registers. The
halves of these are added repeatedly until one number is left; the remaining scores are added one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from llvmlite import ir

from smoe.kernels.builder import Code, copies
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, LONG, WORD, Value

_LANES = 16
_INFINITY = float("inf")
(_VANISHES,) = struct.unpack("f", struct.pack("I", 0xC2AEAC50))
"""The number below which torch's exponential is 0."""
_FRACTION = (-0.079204240219773236, -0.22433836478672356, 0.30354260500649682, 0.00010703434948458272)
"""Coefficients of the polynomial for the fraction of a power of two, from the highest power on."""


def add_softmax(module: ir.Module, isa: Isa) -> None:
    """Add the function `softmax`: scores s [n] become exp(s * scale - maximum), rounded to bf16 and stored as float32.

    `state` contains the maximum of all scores and the sum of the exponentials, over the blocks of keys until now. If a
    later block raises the maximum, the earlier outputs `totals` [size] are multiplied by exp(old maximum - new
    maximum).
    """
    names = ("&s", "n", ".scale", "?is_first", "&state", "&totals", "size", "*expf")
    code = Code(module, isa, "softmax", names, is_local=True)
    s, n, scale, is_first, state, totals, size, expf = code.arguments
    build = code.build
    block_maximum = _largest(code, s, n, scale)
    sum_at = code.element(state, FLOAT, 1)
    old_maximum, old_sum = (code.load(FLOAT, at, 4) for at in (state, sum_at))
    old_maximum = build.select(is_first, copies(FLOAT, -_INFINITY), old_maximum)
    old_sum = build.select(is_first, copies(FLOAT, 0.0), old_sum)
    maximum = build.select(build.fcmp_ordered(">", old_maximum, block_maximum), old_maximum, block_maximum)
    block_sum = _exponentials(code, s, n, maximum, expf)
    factor = code.call_at(expf, [build.fsub(old_maximum, maximum)], FLOAT)
    new_sum = _rescaled(code, factor, old_sum, block_sum)
    code.store(maximum, state, 4)
    code.store(new_sum, sum_at, 4)

    def rescale() -> Sequence[Value]:
        factors = code.splat(factor, _LANES)

        def scaled(d: Value, _: list[Value]) -> Sequence[Value]:
            at = code.element(totals, FLOAT, d)
            code.store(build.fmul(code.load(code.registers(FLOAT, _LANES), at, 64), factors), at, 64)
            return ()

        code.repeat(code.number(0), size, _LANES, [], scaled)
        return ()

    code.either(build.not_(is_first), (), rescale)
    code.end()


def _largest(code: Code, s: Value, n: Value, scale: Value) -> Value:
    """Multiply a block's scores by the scale in place, and return the largest of the first n scores."""
    build, kind = code.build, code.registers(FLOAT, _LANES)
    scales, counts = code.splat(scale, _LANES), code.splat(n, _LANES)
    lanes = ir.Constant(code.registers(LONG, _LANES), [code.number(lane) for lane in range(_LANES)])

    def register(i: Value, found: list[Value]) -> Sequence[Value]:
        at = code.element(s, FLOAT, i)
        x = build.fmul(code.load(kind, at, 64), scales)
        code.store(x, at, 64)
        is_key = build.icmp_signed("<", build.add(code.splat(i, _LANES), lanes), counts)
        wins = build.and_(is_key, build.fcmp_ordered(">", x, found[0]))
        return [build.select(wins, x, found[0])]

    (most,) = code.repeat(code.number(0), n, _LANES, [copies(kind, -_INFINITY)], register)
    return code.intrinsic("llvm.vector.reduce.fmax.v16f32", ir.FunctionType(FLOAT, [kind]), [most])


def _exponentials(code: Code, s: Value, n: Value, maximum: Value, expf: Value) -> Value:
    """Replace a block's scores by their exponentials, rounded to bf16, and return the sum of the exponentials before
    rounding."""
    build, kind = code.build, code.registers(FLOAT, _LANES)
    maxima, whole = code.splat(maximum, _LANES), build.and_(n, code.number(-_LANES))

    def register(j: Value, sums: list[Value]) -> Sequence[Value]:
        at = code.element(s, FLOAT, j)
        bits = _exp(code, build.fsub(code.load(kind, at, 64), maxima))
        following = _alternating(code, sums, build.bitcast(bits, kind))
        code.store(code.near_bits(bits), at, 64)
        return following

    nothing = [copies(kind, 0.0)] * 2
    total = build.fadd(*code.repeat(code.number(0), whole, _LANES, nothing, register, may_be_empty=True))
    for width in (8, 4, 2, 1):  # the order of torch's exchange of halves
        total = build.fadd(total, code.pick(total, [lane ^ width for lane in range(_LANES)]))

    def one(r: Value, sums: list[Value]) -> Sequence[Value]:
        at = code.element(s, FLOAT, r)
        exp = code.call_at(expf, [build.fsub(code.load(FLOAT, at, 4), maximum)], FLOAT)
        code.store(code.near_bits(build.bitcast(exp, WORD)), at, 4)
        return [build.fadd(sums[0], exp)]

    first = build.extract_element(total, code.number(0))
    (found,) = code.repeat(whole, n, 1, [first], one, may_be_empty=True)
    return found


def _alternating(code: Code, sums: Sequence[Value], exponentials: Value) -> Sequence[Value]:
    """Add a register to the first of two sums, and exchange the sums."""
    return [sums[1], code.build.fadd(sums[0], exponentials)]


def _rescaled(code: Code, factor: Value, before: Value, added: Value) -> Value:
    """Return the sum of exponentials, when the maximum has risen: factor * before + added, rounded once."""
    return code.intrinsic("llvm.fma.f32", ir.FunctionType(FLOAT, [FLOAT] * 3), [factor, before, added])


def _exp(code: Code, x: Value) -> Value:
    """Return torch's `fexp_u20` of x as bits: 2 ** (x * log2(e)), with a polynomial for the fraction. The result is
    computed as the bits of a float32."""
    build, kind, words = code.build, x.type, code.registers(WORD, _LANES)
    power = build.fmul(x, copies(kind, 1.44269504))
    floor = code.intrinsic("llvm.floor.v16f32", ir.FunctionType(kind, [kind]), [power])
    fraction = build.fsub(power, floor)
    polynomial, *others = (copies(kind, each) for each in _FRACTION)
    for each in others:
        polynomial = code.fma(fraction, polynomial, each)
    as_bits = code.fma(copies(kind, 2.0**23), build.fsub(power, polynomial), copies(kind, 127 * 2.0**23))
    vanishes = build.fcmp_ordered("<", x, copies(kind, _VANISHES))
    return build.select(vanishes, copies(words, 0), build.fptosi(as_bits, words))
