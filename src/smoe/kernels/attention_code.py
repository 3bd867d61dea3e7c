"""Generates the machine code of `attention.py`: the attention of one query token, with torch's order of sums."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from smoe.kernels.attention import BLOCK, FIELDS
from smoe.kernels.builder import Code, copies, text_of
from smoe.kernels.isa import AVX512
from smoe.kernels.kinds import FLOAT, HALF_WORD, Value
from smoe.kernels.scores import add_scores, add_spread
from smoe.kernels.softmax import add_softmax
from smoe.kernels.weighted_values import add_finish, add_weigh

_ROW = BLOCK + 16
"""The number of floats for a head's scores. It is padded because whole registers are written."""


def module_of() -> str:
    """Return the LLVM text of `attention(fields, unit)`, which computes the query heads of a unit."""
    module, isa = ir.Module(), AVX512
    _add_clear(module)
    add_spread(module, isa)
    add_scores(module, isa, _ROW)
    add_softmax(module, isa)
    add_weigh(module, isa, _ROW)
    add_finish(module, isa)
    _add_attention(module)
    return text_of(module, f"noinline {isa.attributes}")


def _add_attention(module: ir.Module) -> None:
    """Add the main function: a loop over blocks of 512 keys, with temporary memory on the stack."""
    code = Code(module, AVX512, "attention", ("*fields", "unit"))
    at, unit = code.arguments
    build = code.build
    field = code.given(at, FIELDS)
    group, size, count = field["group"], field["size"], field["count"]
    key_row, value_row = field["key_row"], field["value_row"]
    expf, scale = code.pointer(field["exp"]), code.real(field["scale"])
    first, key_head = build.mul(unit, group), build.sdiv(unit, field["splits"])

    def own(name: str, kind: ir.Type, head: Value, distance: Value | int) -> Value:
        return code.element(code.pointer(field[name]), kind, build.mul(head, code.number(distance)))

    query = own("query", HALF_WORD, first, field["query_head"])
    keys = own("keys", HALF_WORD, key_head, field["key_head"])
    values = own("values", HALF_WORD, key_head, field["value_head"])
    out = own("out", HALF_WORD, first, size)
    numbers, pairs_count = build.mul(group, size), build.mul(group, code.number(32))
    queries, totals = (code.scratch(numbers, FLOAT) for _ in range(2))
    pairs, scores = code.scratch(pairs_count, FLOAT), code.scratch(build.mul(group, code.number(_ROW)), FLOAT)
    state = own("sums", FLOAT, first, 2)
    code.call("spread", [queries, query, field["query_head"], size, group])
    code.call("clear", [totals, numbers])
    code.call("clear", [pairs, pairs_count])

    def block(b: Value, _: list[Value]) -> Sequence[Value]:
        n = build.sub(code.smaller(build.add(b, code.number(BLOCK)), count), b)
        keys_here = code.element(keys, HALF_WORD, build.mul(b, key_row))
        values_here = code.element(values, HALF_WORD, build.mul(b, value_row))
        code.call("scores", [queries, keys_here, key_row, n, size, group, pairs, scores])
        is_first = build.icmp_signed("==", b, code.number(0))

        def head(h: Value, _: list[Value]) -> Sequence[Value]:
            row = code.element(scores, FLOAT, build.mul(h, code.number(_ROW)))
            total = code.element(totals, FLOAT, build.mul(h, size))
            own_state = code.element(state, FLOAT, build.mul(h, code.number(2)))
            code.call("softmax", [row, n, scale, is_first, own_state, total, size, expf])
            return ()

        code.repeat(code.number(0), group, 1, [], head)
        code.call("weigh", [scores, values_here, value_row, n, size, group, totals])
        return ()

    code.repeat(code.number(0), count, BLOCK, [], block)
    code.call("finish", [out, totals, state, size, group])
    code.end()


def _add_clear(module: ir.Module) -> None:
    """Add a function that sets a multiple of 16 float32 numbers to zero. The C library's memset is not used, because
    its address changes between processes."""
    code = Code(module, AVX512, "clear", ("*floats", "count"), is_local=True)
    floats, count = code.arguments

    def register(n: Value, _: list[Value]) -> Sequence[Value]:
        code.store(copies(code.registers(FLOAT), 0.0), code.element(floats, FLOAT, n), 64)
        return ()

    code.repeat(code.number(0), count, 16, [], register)
    code.end()
