"""Machine code that interleaves rows of a quantized matrix in memory (`formats/interleaved.py`), once after they were
read. Then products load registers without transposing: a third of their instructions with AVX2."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from smoe.formats.base import Format
from smoe.formats.interleaved import WORD_BYTES, Words, as_in_file, words_of
from smoe.kernels.block_columns import PIECE, Columns
from smoe.kernels.builder import Code
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import BYTE, Value


def function_name(form: Format) -> str:
    return f"interleave_{form.name}"


def add_function(module: ir.Module, isa: Isa, form: Format, arguments: Sequence[str]) -> None:
    """Add the function `interleave_F(-, w, -, -, begin, end, K)` to a module.

    It interleaves the rows from `begin` to `end` - 1 of the matrix w [outputs, K] in place. Both must be multiples of
    `form.rows`, which is the number of lanes.
    """
    code = Code(module, isa, function_name(form), arguments)
    _, w, _, _, begin, end, columns = code.arguments
    build, lanes = code.build, isa.lanes
    blocks = build.udiv(columns, code.number(form.numbers))
    stride = build.mul(blocks, code.number(form.nbytes))
    size = build.mul(stride, code.number(lanes))
    copy = code.scratch(size)

    def group(n: Value, _: list[Value]) -> list[Value]:
        place = code.at(w, build.mul(n, stride))
        _copy(code, place, copy, size)
        rows = [code.at(copy, build.mul(stride, code.number(row))) for row in range(lanes)]

        def block(b: Value, _: list[Value]) -> list[Value]:
            at = build.mul(b, code.number(form.nbytes))
            to = code.at(place, build.mul(b, code.number(form.nbytes * lanes)))
            _put(code, form, [code.at(row, at) for row in rows], to)
            return []

        code.loop(code.number(0), blocks, 1, [], block)
        return []

    code.loop(begin, end, lanes, [], group)
    code.end()


def _put(code: Code, form: Format, rows: Sequence[Value], to: Value) -> None:
    """Write one block of every row, interleaved, to the address `to`."""
    layout, lanes = words_of(form), code.isa.lanes
    assert isinstance(layout, Words), form.name
    columns = Columns(code, as_in_file(form), rows)
    together = PIECE // WORD_BYTES
    for word in (*range(0, layout.number - together, together), layout.number - together):
        for n, register in enumerate(columns.words(layout.begin + WORD_BYTES * word)):
            code.store(register, code.at(to, WORD_BYTES * lanes * (word + n)))
    kind = ir.IntType(8 * layout.other_bytes)
    for n, row in enumerate(rows if layout.other_bytes else ()):
        place = code.at(to, WORD_BYTES * lanes * layout.number + layout.other_bytes * n)
        code.store(code.load(kind, code.at(row, layout.others)), place)


def _copy(code: Code, source: Value, to: Value, size: Value) -> None:
    """Copy at least as many bytes as a register has. The last register may overlap the one before."""
    build, width = code.build, 4 * code.isa.lanes
    kind = code.registers(BYTE, width)

    def one(i: Value, _: list[Value]) -> list[Value]:
        code.store(code.load(kind, code.at(source, i)), code.at(to, i))
        return []

    last = build.sub(size, code.number(width))
    code.loop(code.number(0), last, width, [], one)
    one(last, [])
