"""Generates the machine code of `token_attention.py` and `prompt_heads.py`: norms, and heads with rotary embedding on
their way to the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from smoe.kernels.builder import Code, text_of
from smoe.kernels.isa import AVX512, Isa
from smoe.kernels.kinds import HALF_WORD, LONG, POINTER, Value
from smoe.kernels.norm_code import add_functions as add_norm
from smoe.kernels.token_attention import HEADS, LANES, LAST, NORM, PROMPT_HEADS


def module_of(isa: Isa = AVX512) -> str:
    """Return the LLVM text of `norm_row`, `turn_heads`, `add_and_norm` and `turn_rows`. Each is called as f(arguments,
    unit)."""
    module = ir.Module()
    for function in (add_norm, _add_norm_row, _add_copied, _add_turned, _add_head, _add_turn_heads, _add_and_norm):
        function(module, isa)
    _add_turn_rows(module, isa)
    return text_of(module, isa.attributes)


def _add_norm_row(module: ir.Module, isa: Isa) -> None:
    code = Code(module, isa, "norm_row", ("*arguments", "unit"))
    given = code.given(code.arguments[0], NORM)
    x, weight, out = (code.pointer(given[name]) for name in ("x", "weight", "out"))
    code.call("rms_norm", [x, weight, out, code.number(1), given["size"], code.real(given["eps"])])
    code.end()


def _add_turn_heads(module: ir.Module, isa: Isa) -> None:
    """Add a function that handles one key head of a token. It rotates the key and the query heads that share it, and
    stores the key and the value in the KV cache."""
    code = Code(module, isa, "turn_heads", ("*arguments", "unit"))
    arguments, unit = code.arguments
    build, given = code.build, code.given(arguments, HEADS)
    names = ("cos", "sin", "key_place", "value_place", "q", "k", "v", "q_weight", "k_weight")
    cos, sin, key_place, value_place, q, k, v, q_weight, k_weight = (code.pointer(given[name]) for name in names)
    q_eps, k_eps = code.real(given["q_eps"]), code.real(given["k_eps"])
    group, size = given["group"], given["size"]
    rest = [cos, sin, size, given["rotary"]]
    first = build.mul(unit, group)

    def query(n: Value, _: list[Value]) -> Sequence[Value]:
        head = code.element(q, HALF_WORD, build.mul(build.add(first, n), size))
        code.call("head", [head, head, q_weight, q_eps, *rest])
        return ()

    code.repeat(code.number(0), group, 1, [], query)
    offset = build.mul(unit, size)
    key_to = code.element(key_place, HALF_WORD, build.mul(unit, given["key_head"]))
    code.call("head", [code.element(k, HALF_WORD, offset), key_to, k_weight, k_eps, *rest])
    value_to = code.element(value_place, HALF_WORD, build.mul(unit, given["value_head"]))
    code.call("copied", [code.element(v, HALF_WORD, offset), value_to, code.number(0), size])
    code.end()


def _add_turn_rows(module: ir.Module, isa: Isa) -> None:
    """Add a function that does the same for all key heads of some tokens of a prompt."""
    code = Code(module, isa, "turn_rows", ("*arguments", "unit"))
    arguments, unit = code.arguments
    build, given = code.build, code.given(arguments, PROMPT_HEADS)
    of_token = code.scratch(code.number(len(HEADS)), LONG)
    places = {name: code.element(of_token, LONG, n) for n, name in enumerate(HEADS)}
    for name, place in places.items():
        code.store(given[name], place, 8)
    key_heads = given["key_heads"]
    numbers = build.mul(key_heads, given["size"])
    cosines, keys = (build.mul(count, code.number(2)) for count in (given["rotary"], numbers))
    queries = build.mul(keys, given["group"])
    distances = {"cos": cosines, "sin": cosines, "q": queries, "k": keys, "v": keys}
    distances |= {"key_place": given["key_row"], "value_place": given["value_row"]}
    begin = build.mul(unit, given["step"])
    end = code.smaller(build.add(begin, given["step"]), given["tokens"])

    def token(n: Value, _: list[Value]) -> Sequence[Value]:
        for name, distance in distances.items():
            code.store(build.add(given[name], build.mul(n, distance)), places[name], 8)

        def head(m: Value, _: list[Value]) -> Sequence[Value]:
            code.call("turn_heads", [of_token, m])
            return ()

        code.repeat(code.number(0), key_heads, 1, [], head)
        return ()

    code.repeat(begin, end, 1, [], token)
    code.end()


def _add_head(module: ir.Module, isa: Isa) -> None:
    """Add a function that copies a head, normalized if there is a weight, and rotates its first elements."""
    names = ("*x", "*out", "*weight", ".eps", "*cos", "*sin", "size", "rotary")
    code = Code(module, isa, "head", names, is_local=True)
    x, out, weight, eps, cos, sin, size, rotary = code.arguments
    normed = code.scratch(size, HALF_WORD)

    def norm() -> Sequence[Value]:
        code.call("rms_norm", [x, weight, normed, code.number(1), size, eps])
        return [normed]

    has_norm = code.build.icmp_unsigned("!=", weight, ir.Constant(POINTER, None))
    (source,) = code.either(has_norm, [x], norm)
    code.call("turned", [source, out, cos, sin, rotary])
    code.call("copied", [source, out, rotary, size])
    code.end()


def _add_copied(module: ir.Module, isa: Isa) -> None:
    code = Code(module, isa, "copied", ("*from", "*to", "begin", "end"), is_local=True)
    source, to, begin, end = code.arguments

    def strip(i: Value, _: list[Value]) -> Sequence[Value]:
        numbers = code.load(code.registers(HALF_WORD, LANES), code.element(source, HALF_WORD, i), 2)
        code.store(numbers, code.element(to, HALF_WORD, i), 2)
        return ()

    code.repeat(begin, end, LANES, [], strip, may_be_empty=True)
    code.end()


def _loaded(code: Code, pointer: Value, i: Value) -> Value:
    """Return bf16 numbers as float32, from element `i` on."""
    return code.widened(code.load(code.registers(HALF_WORD, LANES), code.element(pointer, HALF_WORD, i), 2))


def _add_turned(module: ir.Module, isa: Isa) -> None:
    """Add the rotary embedding. It pairs element n of a head's first half with element n of its second half."""
    code = Code(module, isa, "turned", ("*x", "*out", "*cos", "*sin", "rotary"), is_local=True)
    x, out, cos, sin, rotary = code.arguments
    build = code.build
    half = build.lshr(rotary, code.number(1))

    def turned(own: Value, other: Value, cos: Value, sin: Value) -> Value:
        """Return bf16(bf16(own * cos) + bf16(other * sin))."""
        first = code.near(build.fmul(own, cos))
        return code.rounded(build.fadd(first, code.near(build.fmul(other, sin))))

    def strip(i: Value, _: list[Value]) -> Sequence[Value]:
        j = build.add(i, half)
        low, high, low_cos, high_cos, low_sin, high_sin = (
            _loaded(code, pointer, place) for pointer in (x, cos, sin) for place in (i, j)
        )
        first = turned(low, build.fneg(high), low_cos, low_sin)
        second = turned(high, low, high_cos, high_sin)
        code.store(first, code.element(out, HALF_WORD, i), 2)
        code.store(second, code.element(out, HALF_WORD, j), 2)
        return ()

    code.repeat(code.number(0), half, LANES, [], strip)
    code.end()


def _add_and_norm(module: ir.Module, isa: Isa) -> None:
    """Add a function that computes after = bf16(x + added), and its norm."""
    code = Code(module, isa, "add_and_norm", ("*arguments", "unit"))
    given = code.given(code.arguments[0], LAST)
    names = ("x", "after", "normed", "added", "weight")
    x, after, normed, added, weight = (code.pointer(given[name]) for name in names)
    eps, size = code.real(given["eps"]), given["size"]

    def strip(i: Value, _: list[Value]) -> Sequence[Value]:
        total = code.build.fadd(_loaded(code, x, i), _loaded(code, added, i))
        code.store(code.rounded(total), code.element(after, HALF_WORD, i), 2)
        return ()

    code.repeat(code.number(0), size, LANES, [], strip)
    code.call("rms_norm", [after, weight, normed, code.number(1), size, eps])
    code.end()
