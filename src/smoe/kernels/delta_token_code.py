"""Generates the machine code of `delta_token.py`: linear attention with the gated delta rule for one token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir

from smoe.kernels.builder import Code, copies, text_of
from smoe.kernels.delta_token import FIELDS, SMALLEST, TAPS
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, LONG, WORD, Value

_MOST = 80.0
"""The largest magnitude of which the exponential is computed: beyond it, a sigmoid is 0 or 1 in bf16."""
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""The logarithm of 2 in two parts; products of the first one with small integers are exact."""
_EXPONENTIAL = tuple(1 / math.factorial(n) for n in range(6, -1, -1))
"""The coefficients of the polynomial for the exponential of a number of at most ln(2) / 2, from the highest power
on."""


def module_of(isa: Isa, together: int) -> str:
    """Return the LLVM text of `delta_token(fields, unit)`, which computes one key head and its value heads. `together`:
    the number of registers of a block of columns."""
    module = ir.Module()
    _add_convolve(module, isa)
    _add_normalise(module, isa)
    _add_change(module, isa, together)
    _add_finish(module, isa)
    code = Code(module, isa, "delta_token", ("*fields", "unit"))
    at, unit = code.arguments
    build, field = code.build, code.given(at, FIELDS)
    keys, values, shared, key_size = (field[name] for name in ("keys", "values", "shared", "key_size"))
    first = build.mul(unit, keys)
    first_value = build.mul(build.mul(unit, shared), values)
    value_channel = build.add(build.mul(key_size, code.number(2)), first_value)
    x = code.pointer(field["x"])
    own = [(first, keys), (build.add(first, key_size), keys), (value_channel, build.mul(shared, values))]
    for begin, count in own:
        arguments = [code.pointer(field[name]) for name in ("mixed", "last", "taps")]
        code.call("convolve", [*arguments, x, begin, build.add(begin, count)])
    q, k, v = (code.element(x, FLOAT, begin) for begin, _ in own)
    root = code.intrinsic("llvm.sqrt.f32", ir.FunctionType(FLOAT, [FLOAT]), [build.sitofp(keys, FLOAT)])
    code.call("normalise", [q, keys, build.fdiv(ir.Constant(FLOAT, 1.0), root)])
    code.call("normalise", [k, keys, ir.Constant(FLOAT, 1.0)])
    epsilon = code.real(field["epsilon"])

    def head(h: Value, _: list[Value]) -> Sequence[Value]:
        number, offset = build.add(build.mul(unit, shared), h), build.mul(h, values)
        place = build.add(first_value, offset)
        state = code.element(code.pointer(field["state"]), FLOAT, build.mul(number, build.mul(keys, values)))
        decay, gate = (
            code.load(FLOAT, code.element(code.pointer(field[name]), FLOAT, number), 4) for name in ("decay", "gate")
        )
        value = code.element(v, FLOAT, offset)
        code.call("change", [state, q, k, value, decay, gate, keys, values])
        z, out = (code.element(code.pointer(field[name]), HALF_WORD, place) for name in ("z", "out"))
        code.call("finish", [value, z, code.pointer(field["weight"]), out, values, epsilon])
        return ()

    code.repeat(code.number(0), shared, 1, [], head)
    code.end()
    return text_of(module, f"noinline {isa.attributes}")


def _add_convolve(module: ir.Module, isa: Isa) -> None:
    """Add a function that appends the token's values to the last values of the channels from `begin` to `end` - 1, and
    writes silu(sum of taps * last values) as float32. The last values of a channel are one word, the oldest one in its
    lowest bits."""
    names = ("&mixed", "&last", "&taps", "&x", "begin", "end")
    code = Code(module, isa, "convolve", names, is_local=True)
    mixed, last, taps, x, begin, end = code.arguments
    build, words = code.build, code.registers(LONG)

    def numbers(packed: Value, place: int) -> Value:
        """Return the numbers at a place of each word, as float32."""
        low = build.trunc(build.lshr(packed, copies(words, 16 * place)), code.registers(WORD))
        return build.bitcast(build.shl(low, copies(low.type, 16)), code.registers(FLOAT))

    def register(i: Value, _: list[Value]) -> Sequence[Value]:
        at = code.element(last, LONG, i)
        new = build.zext(code.load(code.registers(HALF_WORD), code.element(mixed, HALF_WORD, i), 2), words)
        older = build.lshr(code.load(words, at, 8), copies(words, 16))
        packed = build.or_(older, build.shl(new, copies(words, 16 * (TAPS - 1))))
        code.store(packed, at, 8)
        weights = code.load(words, code.element(taps, LONG, i), 8)
        total = build.fmul(numbers(packed, 0), numbers(weights, 0))
        for place in range(1, TAPS):
            total = code.fma(numbers(packed, place), numbers(weights, place), total)
        total = code.near(total)
        code.store(code.near(build.fmul(total, _sigmoid(code, total))), code.element(x, FLOAT, i), 4)
        return ()

    code.repeat(begin, end, isa.lanes, [], register)
    code.end()


def _add_normalise(module: ir.Module, isa: Isa) -> None:
    """Add a function that divides a vector by its norm and multiplies it by `scale`, in place."""
    code = Code(module, isa, "normalise", ("&x", "count", ".scale"), is_local=True)
    x, count, scale = code.arguments
    build = code.build
    total = _sum_of_squares(code, x, count)
    root = code.intrinsic(
        "llvm.sqrt.f32", ir.FunctionType(FLOAT, [FLOAT]), [build.fadd(total, ir.Constant(FLOAT, SMALLEST))]
    )
    _in_place(code, x, count, code.splat(build.fdiv(scale, root)))
    code.end()


def _add_change(module: ir.Module, isa: Isa, together: int) -> None:
    """Add a function that changes the state of a value head by q, k and v, and writes the output over v, rounded to
    bf16."""
    names = ("&state", "&q", "&k", "&v", ".decay", ".gate", "K", "V")
    code = Code(module, isa, "change", names, is_local=True)
    state, q, k, v, decay, gate, keys, values = code.arguments
    build, kind = code.build, code.registers(FLOAT)
    decays, gates = code.splat(decay), code.splat(gate)

    def block(begin: Value, _: list[Value]) -> Sequence[Value]:
        places = [build.add(begin, code.number(isa.lanes * n)) for n in range(together)]

        def row(key: Value) -> list[Value]:
            base = build.mul(key, values)
            return [code.element(state, FLOAT, build.add(base, place)) for place in places]

        def known(key: Value, sums: list[Value]) -> Sequence[Value]:
            """Add the products of two rows of the state with k, each to sums of its own."""
            found = list[Value]()
            for n in range(2):
                number = build.add(key, code.number(n))
                of_key = code.splat(code.load(FLOAT, code.element(k, FLOAT, number), 4))
                own = sums[n * together : (n + 1) * together]
                found += [
                    code.fma(of_key, code.load(kind, at, 4), each) for at, each in zip(row(number), own, strict=True)
                ]
            return found

        sums = code.repeat(code.number(0), keys, 2, [copies(kind, 0.0)] * (2 * together), known)
        changes = []
        for n, place in enumerate(places):
            before = build.fmul(decays, build.fadd(sums[n], sums[together + n]))
            changes.append(build.fmul(gates, build.fsub(code.load(kind, code.element(v, FLOAT, place), 4), before)))

        def changed(key: Value, outputs: list[Value]) -> Sequence[Value]:
            of_key, of_query = (code.splat(code.load(FLOAT, code.element(each, FLOAT, key), 4)) for each in (k, q))
            found = list[Value]()
            for at, change, output in zip(row(key), changes, outputs, strict=True):
                new = code.fma(of_key, change, build.fmul(decays, code.load(kind, at, 4)))
                code.store(new, at, 4)
                found.append(code.fma(of_query, new, output))
            return found

        outputs = code.repeat(code.number(0), keys, 1, [copies(kind, 0.0)] * together, changed)
        for place, output in zip(places, outputs, strict=True):
            code.store(code.near(output), code.element(v, FLOAT, place), 4)
        return ()

    code.repeat(code.number(0), values, isa.lanes * together, [], block)
    code.end()


def _add_finish(module: ir.Module, isa: Isa) -> None:
    """Add a function that computes the gated RMSNorm of a value head's output."""
    code = Code(module, isa, "finish", ("&x", "&z", "&weight", "&out", "count", ".epsilon"), is_local=True)
    x, z, weight, out, count, epsilon = code.arguments
    build, kind = code.build, code.registers(HALF_WORD)
    mean = build.fdiv(_sum_of_squares(code, x, count), build.sitofp(count, FLOAT))
    root = code.intrinsic("llvm.sqrt.f32", ir.FunctionType(FLOAT, [FLOAT]), [build.fadd(mean, epsilon)])
    scale = code.splat(build.fdiv(ir.Constant(FLOAT, 1.0), root))

    def register(i: Value, _: list[Value]) -> Sequence[Value]:
        normal = code.near(build.fmul(code.load(code.registers(FLOAT), code.element(x, FLOAT, i), 4), scale))
        weights, gates = (code.widened(code.load(kind, code.element(each, HALF_WORD, i), 2)) for each in (weight, z))
        weighted = code.near(build.fmul(weights, normal))
        active = build.fmul(gates, _sigmoid(code, gates))
        code.store(code.rounded(build.fmul(weighted, active)), code.element(out, HALF_WORD, i), 2)
        return ()

    code.repeat(code.number(0), count, isa.lanes, [], register)
    code.end()


def _sum_of_squares(code: Code, x: Value, count: Value) -> Value:
    kind = code.registers(FLOAT)

    def register(i: Value, sums: list[Value]) -> Sequence[Value]:
        numbers = code.load(kind, code.element(x, FLOAT, i), 4)
        return [code.fma(numbers, numbers, sums[0])]

    (total,) = code.repeat(code.number(0), count, code.isa.lanes, [copies(kind, 0.0)], register)
    return code.summed(total)


def _in_place(code: Code, x: Value, count: Value, scales: Value) -> None:
    """Multiply `count` float32 numbers by a scale."""

    def register(i: Value, _: list[Value]) -> Sequence[Value]:
        at = code.element(x, FLOAT, i)
        code.store(code.build.fmul(code.load(scales.type, at, 4), scales), at, 4)
        return ()

    code.repeat(code.number(0), count, code.isa.lanes, [], register)


def _sigmoid(code: Code, x: Value) -> Value:
    """Return 1 / (1 + exp(-x)) of a register."""
    build, ones = code.build, copies(x.type, 1.0)
    return build.fdiv(ones, build.fadd(ones, _exp(code, build.fneg(x))))


def _exp(code: Code, x: Value) -> Value:
    """Return the exponential of a register of numbers, which are limited to a magnitude of `_MOST`: 2 ** n times a
    polynomial of the remainder."""
    build, kind = code.build, x.type
    x = _limited(code, x)
    function = ir.FunctionType(kind, [kind])
    power = code.intrinsic(f"llvm.rint.v{kind.count}f32", function, [code.times(x, 1 / math.log(2))])
    rest = code.fma(power, copies(kind, -_LN2_HIGH), x)
    rest = code.fma(power, copies(kind, -_LN2_LOW), rest)
    total, *others = (copies(kind, each) for each in _EXPONENTIAL)
    for each in others:
        total = code.fma(total, rest, each)
    words = code.registers(WORD, kind.count)
    exponent = build.add(build.fptosi(power, words), copies(words, 127))
    return build.fmul(total, build.bitcast(build.shl(exponent, copies(words, 23)), kind))


def _limited(code: Code, x: Value) -> Value:
    build = code.build
    for limit, is_beyond in ((_MOST, ">"), (-_MOST, "<")):
        bound = copies(x.type, limit)
        x = build.select(build.fcmp_ordered(is_beyond, x, bound), bound, x)
    return x
