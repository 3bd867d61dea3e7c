"""Packs the queries, keys and values of a prompt for the tiles of `prompt_tiles.py`, and unpacks the outputs.

cache      | d0 d1 d2 ...    key by key      becomes    the same, or in float32, as whole tiles
queries    | d0 d1 d2 ...    row by row      becomes    | d of row 0 | d of row 1 | ...    element by element
outputs    element by element, in float32    becomes    | d0 d1 d2 ...    row by row, in bf16
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from llvmlite import ir

from smoe.kernels.builder import Code
from smoe.kernels.kinds import FLOAT, HALF_WORD, LONG, POINTER, WORD, Value
from smoe.kernels.prompt_layout import FIELDS, ROW_ADDRESSES, PromptLayout

_POINTERS = ("query", "keys", "values", "out", "scratch", "taken")


def begun(module: ir.Module, layout: PromptLayout, name: str, *arguments: str) -> tuple[Code, list[Value]]:
    """Return a new machine code function with this name, and its arguments as values. Only code of the same module can
    call the function."""
    code = Code(module, layout.isa, name, arguments, is_local=True)
    return code, code.arguments


def field(code: Code, fields: Value, name: str) -> Value:
    """Return the kernel argument `name` as a value of machine code, loaded from the memory at `fields`."""
    kind = POINTER if name in _POINTERS else LONG
    return code.load(kind, code.at(fields, 8 * FIELDS.index(name)), 8)


def times(code: Code, value: Value, factor: Value | int) -> Value:
    """Return the product of two integers as a value of machine code."""
    return code.build.mul(value, code.number(factor))


def smaller(code: Code, a: Value, b: Value | int) -> Value:
    """Return the smaller of two integers as a value of machine code."""
    b = code.number(b) if isinstance(b, int) else b
    return code.build.select(code.build.icmp_signed("<", a, b), a, b)


def register(code: Code, place: Value, n: int) -> Value:
    """Return register number `n` of the float32 registers at an address."""
    return code.load(code.registers(FLOAT), code.at(place, 4 * code.isa.lanes * n), 4 * code.isa.lanes)


def put(code: Code, value: Value, place: Value, n: int) -> None:
    """Store a float32 register as number `n` of the registers at an address."""
    code.store(value, code.at(place, 4 * code.isa.lanes * n), 4 * code.isa.lanes)


def first_rows(module: ir.Module, layout: PromptLayout) -> None:
    """Add the function `first_rows(fields, block, row, head)`, which initializes a block of query rows with the rows of
    a key head from `row` on.

    If the block extends beyond the last row, the last row is repeated.
    """
    code, (fields, block, row, head) = begun(module, layout, "first_rows", "*fields", "*block", "row", "head")
    build, shared = code.build, field(code, fields, "shared")
    last = build.sub(field(code, fields, "rows"), code.number(1))
    query, out = field(code, fields, "query"), field(code, fields, "out")
    first_head, heads = times(code, head, shared), times(code, field(code, fields, "key_heads"), shared)

    def address(i: Value, _: list[Value]) -> list[Value]:
        own = smaller(code, build.add(row, i), last)
        token = build.udiv(own, shared)
        its_head = build.add(first_head, build.sub(own, times(code, token, shared)))
        position = build.trunc(build.add(token, field(code, fields, "past")), WORD)
        code.store(position, code.at(block, build.add(code.number(layout.positions), times(code, i, 4))), 4)
        from_ = build.add(
            times(code, token, field(code, fields, "query_row")),
            times(code, its_head, field(code, fields, "query_head")),
        )
        to = times(code, build.add(times(code, token, heads), its_head), 2 * layout.size)
        for n, place in enumerate((code.at(query, from_), code.at(out, to))):
            at = build.add(code.number(layout.addresses + 2 * n * layout.line), times(code, i, 8))
            code.store(place, code.at(block, at), 8)
        return []

    code.loop(code.number(0), code.number(layout.width), 1, [], address)
    _each_register(code, layout, layout.isa.lanes * layout.step, functools.partial(_queries, code, layout, block))
    for v in range(layout.vectors):
        put(code, code.reals(-math.inf), code.at(block, layout.largest), v)
        put(code, code.reals(0.0), code.at(block, layout.sums), v)

    def clear(d: Value, _: list[Value]) -> list[Value]:
        for v in range(layout.vectors):
            put(code, code.reals(0.0), code.at(block, build.add(code.number(layout.outputs), d)), v)
        return []

    code.loop(code.number(0), code.number(layout.line * layout.size), layout.line, [], clear)
    code.end()


def _each_register(code: Code, layout: PromptLayout, step: int, body: Callable[[Value, Value], None]) -> None:
    """Generate the code of `body(at, d)` in two loops: over the registers of a line (`at`: the register's offset in the
    line, in bytes), and over every `step`-th element `d` of a head."""

    def register(at: Value, _: list[Value]) -> list[Value]:
        def numbers(d: Value, _: list[Value]) -> list[Value]:
            body(at, d)
            return []

        code.loop(code.number(0), code.number(layout.size), step, [], numbers)
        return []

    code.loop(code.number(0), code.number(layout.line), 4 * layout.isa.lanes, [], register)


def _row_addresses(code: Code, layout: PromptLayout, block: Value, kind: str, at: Value) -> list[Value]:
    """Return the addresses of the query rows (or output rows) whose numbers are in the register at byte `at` of a line.
    `kind`: one of `ROW_ADDRESSES`."""
    begin = layout.addresses + 2 * ROW_ADDRESSES.index(kind) * layout.line
    places = code.at(block, code.build.add(code.number(begin), times(code, at, 2)))
    return [code.load(POINTER, code.at(places, 8 * i), 8) for i in range(layout.isa.lanes)]


def _queries(code: Code, layout: PromptLayout, block: Value, at: Value, d: Value) -> None:
    """Write the elements from element `d` on, one register of them per query row, into the block, transposed. The rows
    are those of the register at byte `at` of a line."""
    build, lanes, words = code.build, layout.isa.lanes, []
    for row in _row_addresses(code, layout, block, "query", at):
        place = code.at(row, times(code, d, 2))
        if layout.step == 2:
            words.append(build.bitcast(code.load(code.registers(WORD), place), code.registers(FLOAT)))
        else:
            words.append(code.widened(code.load(code.registers(HALF_WORD), place)))
    to = code.at(block, build.add(at, times(code, d, layout.line // layout.step)))
    for n, column in enumerate(code.transposed(words)):
        code.store(column, code.at(to, n * layout.line), 4 * lanes)


def packed_keys(module: ir.Module, layout: PromptLayout) -> None:
    """Add the function `packed_keys(memory, keys, stride, count)`, which packs keys and adds zeros up to whole
    tiles."""
    code, (memory, keys, stride, count) = begun(module, layout, "packed_keys", "*memory", "*keys", "stride", "count")
    lanes, size = layout.isa.lanes, layout.size

    def row(n: Value, _: list[Value]) -> list[Value]:
        from_ = _or_nothing(code, memory, keys, stride, n, count)
        to = code.at(memory, code.build.add(code.number(layout.keys), times(code, n, layout.key_row)))
        for d in range(0, size, lanes * layout.step):
            if layout.step == 2:
                code.store(code.load(code.registers(WORD), code.at(from_, 2 * d)), code.at(to, 2 * d), 4 * lanes)
            else:
                numbers = code.widened(code.load(code.registers(HALF_WORD), code.at(from_, 2 * d)))
                code.store(numbers, code.at(to, 4 * d), 4 * lanes)
        return []

    code.loop(code.number(0), whole_tiles(code, layout, count), 1, [], row)
    code.end()


def packed_values(module: ir.Module, layout: PromptLayout) -> None:
    """Add the function `packed_values(memory, values, stride, count)`, which packs the values of `count` keys:
    converted to float32, or in bf16 with the values of two keys interleaved."""
    code, (memory, values, stride, count) = begun(
        module, layout, "packed_values", "*memory", "*values", "stride", "count"
    )
    build, lanes, size = code.build, layout.isa.lanes, layout.size

    def rows(n: Value, _: list[Value]) -> list[Value]:
        each = [_or_nothing(code, memory, values, stride, build.add(n, code.number(i)), count)
                for i in range(layout.step)]  # fmt: skip
        to = code.at(memory, build.add(code.number(layout.values), times(code, n, layout.value_row // layout.step)))
        for d in range(0, size, lanes):
            numbers = [code.load(code.registers(HALF_WORD), code.at(row, 2 * d)) for row in each]
            if layout.step == 1:
                word = code.widened(numbers[0])
            else:
                turns = [n + lanes * i for n in range(lanes) for i in range(2)]
                word = build.shuffle_vector(*numbers, code.words(turns))
            code.store(word, code.at(to, 4 * d), 4 * lanes)
        return []

    code.loop(code.number(0), whole_tiles(code, layout, count), layout.step, [], rows)
    code.end()


def _or_nothing(code: Code, nothing: Value, rows: Value, stride: Value, n: Value, count: Value) -> Value:
    """Return the address of row `n` of the keys or values, or the address `nothing`, where zeros are stored, if n is
    not below `count`."""
    row = code.at(rows, times(code, n, stride))
    return code.build.select(code.build.icmp_signed("<", n, count), row, nothing)


def whole_tiles(code: Code, layout: PromptLayout, count: Value) -> Value:
    """Return a number of keys, rounded up to a multiple of the keys in a tile."""
    more = code.build.add(count, code.number(layout.tile - 1))
    return code.build.and_(more, code.number(-layout.tile))


def last_rows(module: ir.Module, layout: PromptLayout) -> None:
    """Add the function `last_rows(block)`, which divides each row's outputs by the row's sum of weights and stores the
    quotients in bf16.

    A block may contain the last row several times; the same bits are then stored several times.
    """
    code, (block,) = begun(module, layout, "last_rows", "*block")
    build, lanes = code.build, layout.isa.lanes

    def some(at: Value, d: Value) -> None:
        place = code.at(block, at)
        share = build.fdiv(code.reals(1.0), register(code, code.at(place, layout.sums), 0))
        from_ = code.at(place, build.add(code.number(layout.outputs), times(code, d, layout.line)))
        columns = [build.fmul(register(code, code.at(from_, n * layout.line), 0), share) for n in range(lanes)]
        addresses = _row_addresses(code, layout, block, "out", at)
        for to, row in zip(addresses, code.transposed(columns), strict=True):
            code.store(code.rounded(row), code.at(to, times(code, d, 2)), 2)

    _each_register(code, layout, lanes, some)
    code.end()
