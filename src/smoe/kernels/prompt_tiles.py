"""Generates the machine code for `prompt_attention.py`, which explains the method. The functions call each other like
this:

    units                         until all units are taken
      unit                        some blocks of rows of a key head
        first_rows                transposed queries, addresses, initial state
        for 128 keys              packed_keys, packed_values
          for every block         scores, weights, outputs
        last_rows                 division, rounding, storing
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from llvmlite import ir

from smoe.kernels.builder import Code, text_of
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import FLOAT, HALF_WORD, LONG, WORD, Value
from smoe.kernels.prompt_layout import BLOCK, NAME, PromptLayout
from smoe.kernels.prompt_rows import (
    begun,
    field,
    first_rows,
    last_rows,
    packed_keys,
    packed_values,
    put,
    register,
    smaller,
    times,
    whole_tiles,
)

_TURNS = 4
"""The number of steps of a product in one iteration of its loop."""
_EXP2 = (0.009582853142197829, 0.055906426730691836, 0.2402409862276153, 0.6931241931538614, 1.0)
"""Coefficients of a polynomial for 2 ** f, with f from -1/2 to 1/2. Its error is at most 3e-6, and it is exactly 1 at
0, so that outputs are multiplied by 1 if the maximum does not change."""
_TO_WHOLE = 1.5 * 2.0**23
"""A constant that is added to a small float32 number to round it to an integer, which is then in its lowest bits."""


def module_of(isa: Isa, size: int, vectors: int) -> str:
    """Return the LLVM text of `prompt_attention(fields, thread)`, for heads of `size` elements and blocks of `vectors`
    registers of rows.

    The function computes units until all are taken, in the memory of thread number `thread`.
    """
    module, layout = ir.Module(), PromptLayout(isa, size, vectors)
    for function in (first_rows, packed_keys, packed_values, _scores, _weights, _outputs, last_rows, _unit, _units):
        function(module, layout)
    return text_of(module, f"noinline {isa.attributes}")


def _larger(code: Code, a: Value, b: Value) -> Value:
    return code.build.select(code.build.fcmp_ordered(">", a, b), a, b)


def _product(
    code: Code, layout: PromptLayout, copied: Value, across: int, along: int, rows: Value, count: Value
) -> list[Value]:
    """Return `tile` x `vectors` running sums. Sum (r, v) adds, for j below `count`, the product of a word and register
    v of line j of `rows`. The word is at r * `across` + j * `along` bytes after the address `copied`."""
    lanes, vectors = layout.isa.lanes, range(layout.vectors)

    def turn(j: Value, sums: list[Value]) -> list[Value]:
        words, registers = code.at(copied, times(code, j, along)), code.at(rows, times(code, j, layout.line))
        for n in range(_TURNS):
            there = [register(code, code.at(registers, n * layout.line), v) for v in vectors]
            for r in range(layout.tile):
                word = code.splat(code.load(FLOAT, code.at(words, n * along + r * across), 4), lanes)
                for v in vectors:
                    at = r * layout.vectors + v
                    sums[at] = _added(code, sums[at], word, there[v])
        return sums

    nothing = [code.reals(0.0)] * (layout.tile * layout.vectors)
    return code.loop(code.number(0), count, _TURNS, nothing, turn)


def _added(code: Code, total: Value, a: Value, b: Value) -> Value:
    """Return total + a . b in every lane, where each 32-bit word of a and b contains two bf16 numbers or one
    float32."""
    if not code.isa.has_bf16_dots:
        return code.fma(a, b, total)
    halves = code.registers(HALF_WORD, 2 * code.isa.lanes)
    return code.dots(total, code.build.bitcast(a, halves), code.build.bitcast(b, halves))


def _scores(module: ir.Module, layout: PromptLayout) -> None:
    """Add the function `scores(memory, block, first, count, seen, scale)`. It computes the scores of `count` keys, from
    key `first` on, with the queries of a block.

    Every row attends to the first `seen` of the `count` keys. For each later key, its position is compared with that of
    the row. The function also updates the largest score of each row, and the factor by which the row's earlier sums are
    multiplied.
    """
    code, (memory, block, first, count, seen, scale) = begun(
        module, layout, "scores", "*memory", "*block", "first", "count", "seen", "scale"
    )
    build, vectors = code.build, range(layout.vectors)
    keys, scores = code.at(memory, layout.keys), code.at(memory, layout.scores)

    def tile(is_masked: bool) -> Callable[[Value, list[Value]], list[Value]]:
        def some(k: Value, largest: list[Value]) -> list[Value]:
            sums = _product(code, layout, code.at(keys, times(code, k, layout.key_row)), layout.key_row, 4, block,
                            code.number(layout.size // layout.step))  # fmt: skip
            to = code.at(scores, times(code, k, layout.line))
            for r in range(layout.tile):
                key = code.splat(build.trunc(build.add(build.add(first, k), code.number(r)), WORD), layout.isa.lanes)
                for v in vectors:
                    score = sums[r * layout.vectors + v]
                    if is_masked:
                        positions = build.bitcast(register(code, code.at(block, layout.positions), v), key.type)
                        is_later = build.icmp_signed(">", key, positions)
                        score = build.select(is_later, code.reals(-math.inf), score)
                    largest[v] = _larger(code, largest[v], score)
                    put(code, score, code.at(to, r * layout.line), v)
            return largest

        return some

    largest = [code.reals(-math.inf) for _ in vectors]
    whole = build.and_(seen, code.number(-layout.tile))
    largest = code.loop(code.number(0), whole, layout.tile, largest, tile(False))
    largest = code.loop(whole, count, layout.tile, largest, tile(True))
    factor = code.splat(build.bitcast(build.trunc(scale, WORD), FLOAT), layout.isa.lanes)
    for v in vectors:
        before = register(code, code.at(block, layout.largest), v)
        now = _larger(code, before, build.fmul(largest[v], factor))
        put(code, now, code.at(block, layout.largest), v)
        put(code, _exp2(code, build.fsub(before, now)), code.at(block, layout.factors), v)
    code.end()


def _exp2(code: Code, x: Value) -> Value:
    """Return 2 ** x for x <= 0. A polynomial computes the fraction, and the integer part is added to the exponent.
    Subnormal results become 0."""
    build, whole = code.build, code.reals(_TO_WHOLE)
    shifted = build.fadd(x, whole)
    fraction = build.fsub(x, build.fsub(shifted, whole))
    power = code.reals(_EXP2[0])
    for coefficient in _EXP2[1:]:
        power = code.fma(power, fraction, code.reals(coefficient))
    kind = code.registers(WORD)
    exponent = build.shl(build.bitcast(shifted, kind), code.words([23] * code.isa.lanes))
    power = build.bitcast(build.add(build.bitcast(power, kind), exponent), x.type)
    return build.select(build.fcmp_ordered("<", x, code.reals(-126.0)), code.reals(0.0), power)


def _weights(module: ir.Module, layout: PromptLayout) -> None:
    """Add the function `weights(memory, block, count, scale)`, which replaces the scores of `count` keys by softmax
    weights in place and adds the weights to each row's sum."""
    code, (memory, block, count, scale) = begun(module, layout, "weights", "*memory", "*block", "count", "scale")
    build, vectors, lanes = code.build, range(layout.vectors), layout.isa.lanes
    scores = code.at(memory, layout.scores)
    factor = code.splat(build.bitcast(build.trunc(scale, WORD), FLOAT), lanes)
    largest = [build.fneg(register(code, code.at(block, layout.largest), v)) for v in vectors]
    ones = code.halves([0x3F80] * 2 * lanes)

    def keys(k: Value, sums: list[Value]) -> list[Value]:
        from_ = code.at(scores, times(code, k, layout.line))
        to = code.at(scores, times(code, k, layout.line // layout.step))
        for v in vectors:
            each = [_exp2(code, code.fma(register(code, code.at(from_, i * layout.line), v), factor, largest[v]))
                    for i in range(layout.step)]  # fmt: skip
            if layout.step == 1:
                sums[v], word = build.fadd(sums[v], each[0]), each[0]
            else:
                pairs = code.paired(*each)
                sums[v], word = code.dots(sums[v], pairs, ones), build.bitcast(pairs, code.registers(FLOAT))
            put(code, word, to, v)
        return sums

    sums = code.loop(code.number(0), count, layout.step, [code.reals(0.0) for _ in vectors], keys)
    for v in vectors:
        before, now = (register(code, code.at(block, at), v) for at in (layout.sums, layout.factors))
        put(code, code.fma(before, now, sums[v]), code.at(block, layout.sums), v)
    code.end()


def _outputs(module: ir.Module, layout: PromptLayout) -> None:
    """Add the function `outputs(memory, block, count)`, which adds values times weights to the outputs."""
    code, (memory, block, count) = begun(module, layout, "outputs", "*memory", "*block", "count")
    vectors = range(layout.vectors)
    values, weights = code.at(memory, layout.values), code.at(memory, layout.scores)
    steps = code.build.sdiv(count, code.number(layout.step))

    def some(d: Value, _: list[Value]) -> list[Value]:
        sums = _product(code, layout, code.at(values, times(code, d, 4)), 4, layout.value_row, weights, steps)
        to = code.at(block, code.build.add(code.number(layout.outputs), times(code, d, layout.line)))
        for v in vectors:
            factor = register(code, code.at(block, layout.factors), v)
            for r in range(layout.tile):
                place = code.at(to, r * layout.line)
                put(code, code.fma(register(code, place, v), factor, sums[r * layout.vectors + v]), place, v)
        return []

    code.loop(code.number(0), code.number(layout.size), layout.tile, [], some)
    code.end()


def _unit(module: ir.Module, layout: PromptLayout) -> None:
    """Add the function `unit(fields, memory, n)`, which computes unit `n`: some blocks of query rows of one key head.
    Units are counted from the end of the text, where rows attend to the most keys."""
    code, (fields, memory, n) = begun(module, layout, "unit", "*fields", "*memory", "n")
    build, zero, one = code.build, code.number(0), code.number(1)
    rows, blocks, key_heads, past, shared, scale = (
        field(code, fields, name) for name in ("rows", "blocks", "key_heads", "past", "shared", "scale")
    )
    head, from_end = build.urem(n, key_heads), build.udiv(n, key_heads)
    width = times(code, blocks, layout.width)
    all_units = build.udiv(field(code, fields, "units"), key_heads)
    first = times(code, build.sub(build.sub(all_units, one), from_end), width)
    end = smaller(code, build.add(first, width), rows)
    count = build.udiv(build.add(build.sub(end, first), code.number(layout.width - 1)), code.number(layout.width))
    block_at = functools.partial(_block_at, code, layout, memory)

    def begin(u: Value, _: list[Value]) -> list[Value]:
        row = build.add(first, times(code, u, layout.width))
        code.call("first_rows", [fields, block_at(u), row, head])
        return []

    code.loop(zero, count, 1, [], begin)
    keys_end = build.add(build.add(past, build.udiv(build.sub(end, one), shared)), one)
    places = [(code.at(field(code, fields, f"{kind}s"), times(code, head, field(code, fields, f"{kind}_head"))),
               field(code, fields, f"{kind}_row")) for kind in ("key", "value")]  # fmt: skip

    def keys(k: Value, _: list[Value]) -> list[Value]:
        there = smaller(code, build.sub(keys_end, k), BLOCK)
        for name, (place, stride) in zip(("packed_keys", "packed_values"), places, strict=True):
            code.call(name, [memory, code.at(place, times(code, k, stride)), stride, there])

        def attend(u: Value, _: list[Value]) -> list[Value]:
            block = block_at(u)
            positions = code.at(block, layout.positions)
            nearest, furthest = (
                build.sub(build.add(build.sext(code.load(WORD, code.at(positions, 4 * at), 4), LONG), one), k)
                for at in (0, layout.width - 1)
            )
            with build.if_then(build.icmp_signed(">", furthest, zero)):
                own = whole_tiles(code, layout, smaller(code, furthest, BLOCK))
                is_none = build.icmp_signed("<", nearest, zero)
                seen = build.select(is_none, zero, smaller(code, nearest, BLOCK))
                code.call("scores", [memory, block, k, own, seen, scale])
                code.call("weights", [memory, block, own, scale])
                code.call("outputs", [memory, block, own])
            return []

        code.loop(zero, count, 1, [], attend)
        return []

    code.loop(zero, keys_end, BLOCK, [], keys)

    def finish(u: Value, _: list[Value]) -> list[Value]:
        code.call("last_rows", [block_at(u)])
        return []

    code.loop(zero, count, 1, [], finish)
    code.end()


def _block_at(code: Code, layout: PromptLayout, memory: Value, u: Value) -> Value:
    return code.at(memory, code.build.add(code.number(layout.blocks), times(code, u, layout.block)))


def _units(module: ir.Module, layout: PromptLayout) -> None:
    """Add the main function `prompt_attention(fields, thread)`, which computes units until none is left."""
    code = Code(module, layout.isa, NAME, ("*fields", "thread"))
    fields, thread = code.arguments
    build, function = code.build, code.function
    memory = code.at(field(code, fields, "scratch"), times(code, thread, field(code, fields, "stride")))
    nothing = code.registers(WORD)
    for at in range(0, layout.keys, 4 * layout.isa.lanes):
        code.store(ir.Constant(nothing, None), code.at(memory, at))
    taken, units = field(code, fields, "taken"), field(code, fields, "units")
    more, inside, after = (function.append_basic_block(name) for name in ("more", "inside", "after"))
    build.branch(more)
    build.position_at_end(more)
    n = build.atomic_rmw("add", taken, code.number(1), "monotonic")
    build.cbranch(build.icmp_signed("<", n, units), inside, after)
    build.position_at_end(inside)
    code.call("unit", [fields, memory, n])
    build.branch(more)
    build.position_at_end(after)
    code.end()
