"""Rounds rows of activations to 8 bits, for integer products with quantized matrices.

    x      K bf16 numbers
    row    K signed bytes | a scale per group, float32 | the sum of the bytes per group, float32

A group has as many elements as share a scale in the matrix. Its bytes are from -127 to 127, in the order in which the
format stores its codes. The bytes times the scale are the group's rounded values (`formats/activations.py`). A row is
rounded once for all matrices that need its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from smoe.formats.activations import LARGEST, LEAST
from smoe.formats.base import Format
from smoe.kernels.builder import Code
from smoe.kernels.byte_layout import Layout
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import BYTE, FLOAT, HALF_WORD, LONG, WORD, Value
from smoe.kernels.quantised_block import arranged, order_of


class ByteRow(NamedTuple):
    """The addresses of the three arrays of an 8-bit activation row: its bytes, the scales of its groups, and the sums
    of its groups."""

    numbers: Value
    scales: Value
    sums: Value


def parts_of(code: Code, layout: Layout, row: Value, columns: Value) -> ByteRow:
    """Return the addresses of the bytes, scales and sums of the 8-bit activation row at the address `row`, which has
    `columns` elements."""
    build = code.build
    groups = build.mul(build.udiv(columns, code.number(layout.group)), code.number(4))
    scales = code.at(row, columns)
    return ByteRow(row, scales, code.at(scales, groups))


def function_name(layout: Layout) -> str:
    """Return the name of the function that rounds activation rows to 8 bits in this layout."""
    return f"byte_rows_{layout.name}"


def add_function(module: ir.Module, isa: Isa, form: Format, arguments: Sequence[str]) -> None:
    """Add the function `byte_rows_L(x, -, rows, -, begin, end, K)` to a module. It rounds the rows from `begin` to
    `end` - 1 of x [M, K] to 8 bits.

    Each rounded row takes `Layout.nbytes(K)` bytes; the rows follow each other in the memory at `rows`.
    """
    layout = Layout.of(form)
    code = Code(module, isa, function_name(layout), arguments)
    x, _, rows, _, begin, end, columns = code.arguments
    build = code.build
    stride = layout.nbytes_value(code, columns)

    def one(n: Value, _: list[Value]) -> list[Value]:
        place = code.at(x, build.mul(n, build.mul(columns, code.number(2))))
        _fill(code, form, place, parts_of(code, layout, code.at(rows, build.mul(n, stride)), columns), columns)
        return []

    code.loop(begin, end, 1, [], one)
    code.end()


def gated_function_name(layout: Layout) -> str:
    """Return the name of the function that applies the gated activation to rows and rounds the results to 8 bits in
    this layout."""
    return f"gated_byte_rows_{layout.name}"


def add_gated_function(module: ir.Module, isa: Isa, form: Format, arguments: Sequence[str]) -> None:
    """Add the function `gated_byte_rows_L(wide, table, rows, -, begin, end, I)` to a module, which applies the gated
    activation and rounds the results to 8 bits.

    For each row from `begin` to `end` - 1 of wide [M, 2I] (gate, then up), the function computes table[gate] * up in
    bf16. It rounds the products to rows that begin `Layout.nbytes(I)` bytes after each other. `table` contains the
    activation's value for every bf16 number (`elementwise.py`).
    """
    layout = Layout.of(form)
    code = Code(module, isa, gated_function_name(layout), arguments)
    wide, table, rows, _, begin, end, columns = code.arguments
    build = code.build
    stride = layout.nbytes_value(code, columns)
    inner = code.scratch(build.mul(columns, code.number(2)))

    def one(n: Value, _: list[Value]) -> list[Value]:
        gate = code.at(wide, build.mul(n, build.mul(columns, code.number(4))))
        _gate(code, gate, table, inner, columns)
        _fill(code, form, inner, parts_of(code, layout, code.at(rows, build.mul(n, stride)), columns), columns)
        return []

    code.loop(begin, end, 1, [], one)
    code.end()


def _gate(code: Code, gate: Value, table: Value, inner: Value, columns: Value) -> None:
    """Compute inner [I] = table[gate] * up, rounded to bf16 as torch does."""
    build, lanes = code.build, code.isa.lanes
    up = code.at(gate, build.mul(columns, code.number(2)))

    def some(i: Value, _: list[Value]) -> list[Value]:
        at = build.mul(i, code.number(2))
        active = ir.Constant(code.registers(HALF_WORD), ir.Undefined)
        for n in range(lanes):
            which = build.zext(code.load(HALF_WORD, code.at(gate, build.add(at, code.number(2 * n)))), LONG)
            number = code.load(HALF_WORD, code.at(table, build.mul(which, code.number(2))))
            active = build.insert_element(active, number, ir.Constant(WORD, n))
        ups = code.widened(code.load(code.registers(HALF_WORD), code.at(up, at)))
        code.store(code.rounded(build.fmul(code.widened(active), ups)), code.at(inner, at))
        return []

    code.loop(code.number(0), columns, lanes, [], some)


def _fill(code: Code, form: Format, x: Value, row: ByteRow, columns: Value) -> None:
    """Round one activation row x to 8 bits, group by group."""
    build, lanes, size = code.build, code.isa.lanes, Layout.of(form).group

    def group(k: Value, _: list[Value]) -> list[Value]:
        whole, scale = _in_whole_numbers(code, size, code.at(x, build.mul(k, code.number(2))))
        at = build.mul(build.udiv(k, code.number(size)), code.number(4))
        code.store(scale, code.at(row.scales, at))
        code.store(build.sitofp(_sum(code, whole), FLOAT), code.at(row.sums, at))
        for n, register in enumerate(arranged(code, whole, order_of(form))):
            place = code.at(row.numbers, build.add(k, code.number(n * lanes)))
            code.store(build.trunc(register, code.registers(BYTE)), place)
        return []

    code.loop(code.number(0), columns, size, [], group)


def _in_whole_numbers(code: Code, size: int, x: Value) -> tuple[list[Value], Value]:
    """Return a group of the activation row x as registers of integers, in the order of x, and the group's scale. The
    scale is NaN or infinite if an element of the group is."""
    build, lanes = code.build, code.isa.lanes
    reals: list[Value] = []
    largest: Value = None
    for i in range(0, size, lanes):
        wide = code.widened(code.load(code.registers(HALF_WORD), code.at(x, 2 * i)))
        bits = build.and_(build.bitcast(wide, code.registers(WORD)), code.words([0x7FFFFFFF] * lanes))
        largest = bits if largest is None else _larger(code, largest, bits)
        reals.append(wide)
    while largest.type.count > 1:
        half = largest.type.count // 2
        largest = _larger(code, code.pick(largest, range(half)), code.pick(largest, range(half, 2 * half)))
    magnitude = build.bitcast(build.extract_element(largest, ir.Constant(WORD, 0)), FLOAT)
    most, none = ir.Constant(FLOAT, LARGEST), ir.Constant(FLOAT, 0.0)
    is_little = build.fcmp_ordered("<", magnitude, ir.Constant(FLOAT, LEAST))
    gain = code.splat(build.select(is_little, none, build.fdiv(most, magnitude)))
    scale = build.select(is_little, none, build.fdiv(magnitude, most))
    return [code.nearest(build.fmul(each, gain)) for each in reals], scale


def _larger(code: Code, a: Value, b: Value) -> Value:
    return code.build.select(code.build.icmp_unsigned(">", a, b), a, b)


def _sum(code: Code, registers: Sequence[Value]) -> Value:
    """Return the sum of all numbers in registers of integers."""
    total = registers[0]
    for register in registers[1:]:
        total = code.build.add(total, register)
    while total.type.count > 1:
        half = total.type.count // 2
        total = code.build.add(code.pick(total, range(half)), code.pick(total, range(half, 2 * half)))
    return code.build.extract_element(total, ir.Constant(WORD, 0))
