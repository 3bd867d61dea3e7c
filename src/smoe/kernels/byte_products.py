"""Products of rows in 8 bits with quantized matrices: one kernel for a single row up to whole prompts.

    strip      two registers of outputs: 16 rows of the matrix if a register has 8 numbers
    tile       a part of the strip along K, unpacked once: codes in bytes, four of each output together
                   | 4 codes of output 0 | 4 codes of output 1 | ... | then the next four along K
    product    tile x two or four rows of activations at a time; four bytes of a row are copied to all outputs:
                   sums += codes . bytes                        exact, in integers
                   per group:    total += scale * (gain * (sums - zero * sum of bytes) - offset * sum of bytes)

    few rows   no tile: codes are multiplied with up to four rows of activations while they are in registers

A code is unpacked once for all rows of a tile, in a few instructions for 32 codes, so a few rows are limited by memory
bandwidth. Each output is summed in one lane from beginning to end, so its bits depend neither on the number of rows nor
on other outputs. The order of sums depends on format and instruction set (grade E1). Rows are rounded as `byte_rows.py`
describes; apart from that, only the sums over groups are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from llvmlite import ir

from smoe.cpu_isa import X86
from smoe.formats.base import Format, Group, Points, Run
from smoe.kernels.block_columns import PIECE, Columns, InterleavedColumns, is_in_planes
from smoe.kernels.builder import Code
from smoe.kernels.byte_layout import Layout
from smoe.kernels.byte_rows import ByteRow, parts_of
from smoe.kernels.isa import Isa
from smoe.kernels.kinds import BYTE, FLOAT, LONG, POINTER, WORD, Value

STRIPS = 2
"""The number of registers of outputs that are computed together, as a strip."""
TILE_COLUMNS = 1024
"""The number of elements along K that are unpacked at a time: 16 KB for 16 outputs, half of the first-level cache."""
MOST_AHEAD = 40 << 10
"""The largest distance between computation and prefetch, in bytes; it is most of the first-level cache.

The prefetch is two strips ahead, or one if two exceed this size. With rows of 2048 elements, Q8_0 is read at 56 GB/s
with one strip and 39 with two, Q4_K at 48 with one and up to 72 with two.
"""
_HALF = 8
"""Half of the number of lanes of the widest registers."""
_LINE = 64
_PINNED, _PINNED_ROWS = 8, 4
"""The number of elements of a row after which instructions are not moved across a point in the code, so that fewer
registers are in use: for one activation row, and for several."""
_FEW, _FEW_BY_PAIRS = 8, 4
"""The largest number of activation rows that are multiplied without a tile. The second number is for unsigned codes on
CPUs that multiply by pairs (`_Products.by_pairs`)."""
FEW_TOGETHER = (4, 3, 2, 1)
"""The numbers of activation rows for which a code is then unpacked once: as many as possible of the first number, then
of the next."""
_TOGETHER, _TOGETHER_BY_PAIRS = (2, 1), (4, 2, 1)
"""The numbers of activation rows that are multiplied with a tile at a time. With pairs, codes that were loaded serve
four rows, which takes a tenth less time; otherwise it makes no difference (docs/log/kernels.md)."""
_MOST_IN_16_BITS = 128
"""The largest code c for which 2 * 127 * c fits in a signed 16-bit number."""


class _Codes(NamedTuple):
    """The representation of a quantized format's codes as bytes."""

    zero: int
    """The number that is subtracted from each code."""
    most: int
    """The largest magnitude of a code."""
    is_signed: bool = False
    table: tuple[int, ...] | None = None
    """For formats with a table: the numbers that the 16 codes stand for."""
    unit: float = 1.0
    """The value of 1 in `table`, whose numbers are integer multiples of it."""


def codes_of(isa: Isa, form: Format) -> _Codes:
    """Return how the codes of a quantized format are represented as bytes: signed if the CPU multiplies signed bytes
    easily, else unsigned if sums of their products fit."""
    if form.table is not None:
        unit = min(abs(number) for number in form.table if number)
        whole = tuple(round(number / unit) for number in form.table)
        assert [number * unit for number in whole] == list(form.table), form.name
        least, most = min(whole), max(whole)
        if isa.has_signed_bytes or not (most - least <= _MOST_IN_16_BITS or isa.has_int8_dots):
            return _Codes(0, max(most, -least), True, whole, unit)
        return _Codes(-least, most - least, False, tuple(number - least for number in whole), unit)
    if form.grid is not None:
        return _Codes(0, form.most, True) if isa.has_signed_bytes else _Codes(form.most, 2 * form.most)
    if form.is_signed:
        return _Codes(128, 255) if isa.has_int8_dots and not isa.has_signed_bytes else _Codes(0, 128, True)
    return _Codes(form.zero, form.most)


def function_name(form: Format) -> str:
    return f"byte_products_{form.name}"


def add_function(module: ir.Module, isa: Isa, form: Format, arguments: Sequence[str]) -> None:
    """Add the function `byte_products_F(given, w, -, bias, begin, end, K)` to a module. It computes the outputs from
    `begin` to `end` - 1 of M activation rows.

    `given` contains M, and then for each activation row two addresses: that of its 8-bit form, and that of its outputs
    in bf16. `bias` may be null. If the matrix's rows are interleaved (`Format.rows`), `begin` and `end` must be
    multiples of the number of lanes, which is that of the interleaved rows.
    """
    if _has_wide_strips(isa, form):
        half = Code(module, replace(isa, lanes=isa.lanes // 2), _one_row_name(form), arguments)
        _Products(half, form).build_one_row()
        half.end()
    code = Code(module, isa, function_name(form), arguments)
    _Products(code, form).build()
    code.end()


def _one_row_name(form: Format) -> str:
    return f"byte_row_product_{form.name}"


def _has_wide_strips(isa: Isa, form: Format) -> bool:
    """Return whether the rows of one register are so long that prefetched lines leave the first-level cache before they
    are used.

    An example are 16 rows of 2048 elements in Q8_0, which have 35 KB. A single row of activations is then multiplied
    with half as many rows of the matrix at a time: 70 instead of 61 GB/s.
    """
    return form.rows == 1 and isa.lanes > _HALF and form.nbytes >= form.numbers


def _bytes_of(run: Run, i: int) -> list[int]:
    """Return the numbers of the bytes that contain the code of element `i` of a run. The byte of the code's last field
    comes first."""
    fields = [field.indices[0][0] if isinstance(field, Points) else field for field in run.fields]
    return [field.byte + i for field in reversed(fields)]


class _Products:
    """Builds the function `byte_products_F`, which multiplies 8-bit activation rows with a quantized matrix, for one
    format F."""

    def __init__(self, code: Code, form: Format) -> None:
        self.code = code
        self.form = form
        self.layout = Layout.of(form)
        self.codes = codes_of(code.isa, form)
        self.is_in_planes = is_in_planes(code.isa, form)
        self.has_offsets = form.minimum is not None
        self.by_pairs = code.isa.family == X86 and not code.isa.has_int8_dots
        """Whether sums of two products are added in 16 bits, for want of an instruction for dot products of bytes."""
        self.few = _FEW_BY_PAIRS if self.by_pairs and not self.codes.is_signed else _FEW
        self.together = _TOGETHER_BY_PAIRS if self.by_pairs else _TOGETHER
        self.given, self.w, _, self.bias, self.first, self.end, self.columns = code.arguments
        build, lanes = code.build, code.isa.lanes
        self.rows = code.load(LONG, self.given)
        self.blocks = build.udiv(self.columns, code.number(form.numbers))
        self.stride = build.mul(self.blocks, code.number(form.nbytes))
        self.block_bytes = form.nbytes * form.rows
        """The number of bytes from a block to the next one of the same rows."""
        self.tile_blocks = max(1, TILE_COLUMNS // form.numbers)
        self.tile_columns = self.tile_blocks * form.numbers
        groups = self.tile_columns // self.layout.group
        self.tile_strip, self.gain_strip = self.tile_columns * lanes, 4 * groups * lanes
        """The number of bytes per register of outputs in the tile, and in its gains or offsets."""
        self.tile = code.scratch(code.number(STRIPS * self.tile_strip))
        self.gains = code.scratch(code.number(STRIPS * self.gain_strip))
        self.offsets = code.scratch(code.number(STRIPS * self.gain_strip)) if self.has_offsets else None
        self.total_row = 4 * lanes * STRIPS
        self.totals = code.scratch(build.mul(self.rows, code.number(self.total_row)))
        self.last = build.sub(self.end, code.number(1))

    def build(self) -> None:
        code, build = self.code, self.code.build
        with build.if_else(build.icmp_signed("==", self.rows, code.number(1))) as (alone, several):
            with alone:
                if _has_wide_strips(code.isa, self.form):
                    code.call(_one_row_name(self.form), code.arguments)
                else:
                    self.build_one_row()
            with several:
                self._fetch_first()
                with build.if_else(build.icmp_signed("<=", self.rows, code.number(self.few))) as (few, many):
                    with few:
                        code.loop(self.first, self.end, code.isa.lanes, [], lambda n, _: self._few_rows(n))
                    with many:
                        code.loop(self.first, self.end, STRIPS * code.isa.lanes, [], lambda n, _: self._strip(n))

    def build_one_row(self) -> None:
        """Build the code that multiplies a single activation row with the matrix."""
        self._fetch_first()
        self.code.loop(self.first, self.end, self.code.isa.lanes, [], lambda n, _: self._one_row(n))

    def _fetch_first(self) -> None:
        """Prefetch all weights of the first outputs at once. If they were prefetched piece by piece, the computation
        would wait for each piece."""
        code, build = self.code, self.code.build
        outputs = build.sub(self.end, self.first)
        most = self._outputs_ahead()
        outputs = build.select(build.icmp_signed("<", outputs, most), outputs, most)
        begin = code.at(self.w, build.mul(self.first, self.stride))

        def line(i: Value, _: list[Value]) -> list[Value]:
            code.prefetch(code.at(begin, i), is_read_once=True)
            return []

        code.loop(code.number(0), build.mul(outputs, self.stride), _LINE, [], line)

    def _outputs_ahead(self) -> Value:
        """Return the distance from the computation to the prefetch, as a number of outputs (rows of the matrix)."""
        build, number, lanes = self.code.build, self.code.number, self.code.isa.lanes
        is_little = build.icmp_signed("<=", build.mul(self.stride, number(2 * lanes)), number(MOST_AHEAD))
        return build.select(is_little, number(2 * lanes), number(lanes))

    def _lines_of_block(self) -> int:
        """Return the number of cache lines to prefetch for one block of each output of a strip. It is rounded up: a
        block may begin within a line, and the computation would wait for every line left out."""
        return -(-self.form.nbytes * self.code.isa.lanes // _LINE)

    def _following(self, n: Value) -> Value:
        """Return the address to prefetch while the outputs from `n` on are computed.

        For the last outputs it is their own address, because the outputs that follow belong to another call.
        """
        code, build = self.code, self.code.build
        following = build.add(n, self._outputs_ahead())
        is_inside = build.icmp_signed("<", following, self.end)
        return code.at(self.w, build.mul(build.select(is_inside, following, n), self.stride))

    def _strip(self, n: Value) -> list[Value]:
        """Build the code that computes one strip of outputs, from output `n` on, for several activation rows."""
        code = self.code
        code.loop(code.number(0), self.blocks, self.tile_blocks, [], lambda b, _: self._piece(n, b))
        self._store_outputs(n, STRIPS)
        return []

    def _one_row(self, n: Value) -> list[Value]:
        """Build the code that computes outputs from output `n` on for a single activation row."""
        self._rows_at_once(n, self.code.number(0), 1)
        self._store_outputs(n, 1)
        return []

    def _few_rows(self, n: Value) -> list[Value]:
        """Build the code that computes outputs from output `n` on for a few activation rows."""
        self._for_all_rows(FEW_TOGETHER, lambda m, rows: self._rows_at_once(n, m, rows))
        self._store_outputs(n, 1)
        return []

    def _for_all_rows(self, together: Sequence[int], multiply: Callable[[Value, int], list[Value]]) -> None:
        """Build the code that calls `multiply(m, rows)` for all activation rows: rows `m` to m + rows - 1. `rows` is as
        often as possible the first of the numbers `together`, then the next."""
        begin = self.code.number(0)
        for rows in together:
            begin = self._in_steps(begin, rows, multiply)

    def _in_steps(self, begin: Value, rows: int, multiply: Callable[[Value, int], list[Value]]) -> Value:
        """Build the code that calls `multiply(m, rows)` for all activation rows from `begin` on, `rows` at a time.
        Return the number of the first row that is left."""
        code, build = self.code, self.code.build
        end = build.sub(self.rows, build.urem(build.sub(self.rows, begin), code.number(rows)))
        code.loop(begin, end, rows, [], lambda m, _: multiply(m, rows))
        return end

    def _rows_at_once(self, n: Value, m: Value, rows: int) -> list[Value]:
        """Build the code that computes outputs from output `n` on for the activation rows `m` to m + rows - 1. Codes
        are multiplied as soon as they are unpacked, and are unpacked again for other rows."""
        code, build, form, lanes = self.code, self.code.build, self.form, self.code.isa.lanes
        places, following = self._places(n, code.number(0)), self._following(n)
        xs = [self._row(build.add(m, code.number(r)), code.number(0)) for r in range(rows)]

        def block(b: Value, totals: list[Value]) -> list[Value]:
            at = build.mul(b, code.number(self.block_bytes))
            ahead = code.at(following, build.mul(b, code.number(form.nbytes * lanes)))
            here = [self._from_block(x, b) for x in xs]
            return self._add_block([code.at(place, at) for place in places], here, ahead, totals)

        totals = code.loop(code.number(0), self.blocks, 1, [code.reals(0.0)] * rows, block)
        for r, total in enumerate(totals):
            at = build.mul(build.add(m, code.number(r)), code.number(self.total_row))
            code.store(total, code.at(self.totals, at), 4 * lanes)
        return []

    def _add_block(
        self, places: Sequence[Value], xs: Sequence[ByteRow], ahead: Value, totals: Sequence[Value]
    ) -> list[Value]:
        """Return `totals` [lanes each] plus the products of the activation rows `xs` with one block of each of `lanes`
        outputs. Also prefetch at the address `ahead`."""
        code, form, kind = self.code, self.form, self.codes
        columns = self._columns(places)
        scale = columns.scalar(form.scale)
        minimum = None if form.minimum is None else columns.scalar(form.minimum)
        lines, fetched, k, found = self._lines_of_block(), 0, 0, list(totals)
        pinned = _PINNED if len(xs) == 1 else _PINNED_ROWS
        for g, group in enumerate(form.groups):
            sums = [code.dot_sum(kind.most, kind.is_signed) for _ in xs]
            for run in group.runs:
                for i in range(0, run.numbers, PIECE):
                    words = [self._words(code.at(x.numbers, k)) for x in xs]
                    for codes in columns.codes(run.fields, i):
                        bytes_ = self._as_bytes(codes)
                        for each, of_row in zip(sums, words, strict=True):
                            each.add(bytes_, next(of_row))
                        k += 4
                        if k % pinned == 0:
                            for each in sums:
                                each.pin()
                    while fetched * form.numbers < lines * k:
                        code.prefetch(code.at(ahead, _LINE * fetched), is_read_once=True)
                        fetched += 1
            gain, offset = (
                self._gain(columns, group, scale),
                None if minimum is None else columns.offset(group, minimum),
            )
            for r, x in enumerate(xs):
                scales, x_sums = (code.at(each, 4 * g) for each in (x.scales, x.sums))
                found[r] = self._scaled(sums[r].total(), gain, offset, scales, x_sums, found[r])
        return found

    def _columns(self, places: Sequence[Value]) -> Columns:
        if self.form.rows > 1:
            return InterleavedColumns(self.code, self.form, places[0], self.codes.zero)
        return Columns(self.code, self.form, places, self.codes.zero)

    def _gain(self, columns: Columns, group: Group, scale: Value) -> Value:
        """Return the factor for the codes of a group in their byte representation: float32 [lanes]."""
        gain, unit = columns.gain(group, scale), self.codes.unit
        return gain if unit == 1 else self.code.build.fmul(gain, self.code.reals(unit))

    def _scaled(self, sums: Value, gain: Value, offset: Value, scale_at: Value, sum_at: Value, total: Value) -> Value:
        """Return total [lanes] + scale * (gain * (codes . bytes - zero * sum of bytes) - offset * sum of bytes), where
        `bytes` are those of the activation row."""
        code, build, zero = self.code, self.code.build, self.codes.zero
        scale = code.splat(code.load(FLOAT, scale_at, 4))
        dots = build.sitofp(sums, code.registers(FLOAT))
        if zero or offset is not None:
            x_sum = code.splat(code.load(FLOAT, sum_at, 4))
        if zero:
            dots = code.fma(code.reals(-float(zero)), x_sum, dots)
        if offset is None:
            return code.fma(build.fmul(gain, scale), dots, total)
        return code.fma(scale, code.fma(gain, dots, build.fneg(build.fmul(offset, x_sum))), total)

    def _copied(self, x: Value) -> Value:
        """Return a register in which the four bytes at the address `x` of an activation row are copied for every
        output: [4 * lanes]."""
        code = self.code
        return code.build.bitcast(code.splat(code.load(WORD, x)), code.registers(BYTE, 4 * code.isa.lanes))

    def _words(self, x: Value) -> Iterator[Value]:
        """Yield four registers for 16 bytes of the activation row at the address `x`. Each has four of the bytes,
        copied for every output, in the order of `Columns.codes`."""
        code = self.code
        if not self.is_in_planes:
            yield from (self._copied(code.at(x, n)) for n in range(0, PIECE, 4))
            return
        turned = code.pick(code.load(code.registers(BYTE, PIECE), x), [n % 4 * 4 + n // 4 for n in range(PIECE)])
        words = code.build.bitcast(turned, code.registers(WORD, PIECE // 4))
        for n in range(PIECE // 4):
            every = code.pick(words, [n] * code.isa.lanes)
            yield code.build.bitcast(every, code.registers(BYTE, 4 * code.isa.lanes))

    def _places(self, n: Value, b: Value) -> list[Value]:
        """Return, for each of `lanes` outputs from output `n` on, the address of block `b` in its row of the matrix.
        Beyond the last output, the address of the last output is repeated. If rows are interleaved, their blocks have
        one address."""
        code, build = self.code, self.code.build
        at, found = build.mul(b, code.number(self.block_bytes)), list[Value]()
        if self.form.rows > 1:
            last = build.sub(self.end, code.number(code.isa.lanes))
            row = build.select(build.icmp_signed("<", n, self.end), n, last)
            return [code.at(self.w, build.add(build.mul(row, self.stride), at))]
        for r in range(code.isa.lanes):
            row = build.add(n, code.number(r))
            row = build.select(build.icmp_signed("<", row, self.end), row, self.last)
            found.append(code.at(self.w, build.add(build.mul(row, self.stride), at)))
        return found

    def _piece(self, n: Value, b: Value) -> list[Value]:
        """Build the code that unpacks one tile (the blocks from `b` on of the outputs from `n` on) and multiplies the
        tile with all activation rows."""
        code, build = self.code, self.code.build
        left = build.sub(self.blocks, b)
        is_more = build.icmp_signed("<", left, code.number(self.tile_blocks))
        count = build.select(is_more, left, code.number(self.tile_blocks))
        for strip in range(STRIPS):
            self._unpack(build.add(n, code.number(strip * code.isa.lanes)), b, count, strip)
        self._for_all_rows(self.together, lambda m, rows: self._multiply(m, b, count, rows))
        return []

    def _unpack(self, n: Value, b: Value, count: Value, strip: int) -> None:
        """Build the code that unpacks `count` blocks, from block `b` on, of `lanes` outputs from output `n` on, into
        strip number `strip` of the tile."""
        code, build, form, lanes = self.code, self.code.build, self.form, self.code.isa.lanes
        places = self._places(n, b)
        following = code.at(self._following(n), build.mul(b, code.number(form.nbytes * lanes)))

        def block(i: Value, _: list[Value]) -> list[Value]:
            ahead = code.at(following, build.mul(i, code.number(form.nbytes * lanes)))
            at = build.mul(i, code.number(self.block_bytes))
            self._unpack_block([code.at(place, at) for place in places], i, strip, ahead)
            return []

        code.loop(code.number(0), count, 1, [], block)

    def _unpack_block(self, places: Sequence[Value], i: Value, strip: int, ahead: Value) -> None:
        """Unpack one block of each output into position `i` of the tile, and prefetch at the address `ahead`."""
        code, build, form, lanes = self.code, self.code.build, self.form, self.code.isa.lanes
        columns, groups = self._columns(places), len(form.groups)
        scale = columns.scalar(form.scale)
        minimum = None if form.minimum is None else columns.scalar(form.minimum)
        at = build.mul(i, code.number(4 * lanes * groups))
        gains = code.at(code.at(self.gains, strip * self.gain_strip), at)
        offsets = code.at(code.at(self.offsets, strip * self.gain_strip), at) if self.has_offsets else None
        for g, group in enumerate(form.groups):
            gain = self._gain(columns, group, scale)
            if offsets is not None:
                code.store(columns.offset(group, minimum), code.at(offsets, 4 * lanes * g), 4 * lanes)
            code.store(gain, code.at(gains, 4 * lanes * g), 4 * lanes)
        tile = code.at(code.at(self.tile, strip * self.tile_strip), build.mul(i, code.number(form.numbers * lanes)))
        lines, pieces = self._lines_of_block(), self._pieces()
        for number, (place, (run, first)) in enumerate(pieces):
            for n, codes in enumerate(columns.codes(run.fields, first)):
                code.store(self._as_bytes(codes), code.at(tile, (place + 4 * n) * lanes), 4 * lanes)
            for line in range(lines * number // len(pieces), lines * (number + 1) // len(pieces)):
                code.prefetch(code.at(ahead, _LINE * line))
            code.cut()

    def _pieces(self) -> list[tuple[int, tuple[Run, int]]]:
        """Return (offset among the block's codes, (run, first element)) for every 16 elements, in the order of their
        bytes."""
        found, place = [], 0
        for group in self.form.groups:
            for run in group.runs:
                for i in range(0, run.numbers, PIECE):
                    found.append((place, (run, i)))
                    place += PIECE
        return sorted(found, key=lambda piece: _bytes_of(*piece[1]))

    def _as_bytes(self, codes: Value) -> Value:
        code, kind = self.code, self.codes
        if kind.table is not None:
            return code.looked_up_bytes(kind.table, codes)
        if self.form.is_signed and not kind.is_signed:
            return code.build.xor(codes, code.bytes([kind.zero] * codes.type.count))
        return codes

    def _multiply(self, m: Value, b: Value, count: Value, rows: int) -> list[Value]:
        """Multiply the activation rows `m` to m + rows - 1 with the tile, which begins at block `b`, and add the
        products to the rows' totals."""
        code, build, lanes = self.code, self.code.build, self.code.isa.lanes
        places = [
            code.at(self.totals, build.mul(build.add(m, code.number(r)), code.number(self.total_row)))
            for r in range(rows)
        ]
        is_first = build.icmp_signed("==", b, code.number(0))
        nothing = code.reals(0.0)
        begin = []
        for place in places:
            for strip in range(STRIPS):
                before = code.load(code.registers(FLOAT), code.at(place, 4 * lanes * strip), 4 * lanes)
                begin.append(build.select(is_first, nothing, before))
        xs = [self._row(build.add(m, code.number(r)), b) for r in range(rows)]
        groups = build.mul(count, code.number(len(self.form.groups)))
        ended = code.loop(code.number(0), groups, 1, begin, lambda g, totals: self._add_group(g, xs, totals))
        for n, total in enumerate(ended):
            row, strip = divmod(n, STRIPS)
            code.store(total, code.at(places[row], 4 * lanes * strip), 4 * lanes)
        return []

    def _row(self, m: Value, b: Value) -> ByteRow:
        """Return the addresses of the bytes, scales and sums of activation row number `m`, from block `b` on."""
        code, build = self.code, self.code.build
        row = code.load(POINTER, code.at(self.given, build.add(build.mul(m, code.number(16)), code.number(8))))
        return self._from_block(parts_of(code, self.layout, row, self.columns), b)

    def _from_block(self, row: ByteRow, b: Value) -> ByteRow:
        code, build = self.code, self.code.build
        numbers, scales, sums = row
        at = build.mul(b, code.number(4 * len(self.form.groups)))
        return ByteRow(
            code.at(numbers, build.mul(b, code.number(self.form.numbers))), code.at(scales, at), code.at(sums, at)
        )

    def _add_group(self, g: Value, xs: Sequence[ByteRow], totals: Sequence[Value]) -> list[Value]:
        """Return `totals` plus the products of the activation rows with group number `g` of the tile."""
        code, build, lanes, size = self.code, self.code.build, self.code.isa.lanes, self.layout.group
        tile = code.at(self.tile, build.mul(g, code.number(size * lanes)))
        at, lane_at = build.mul(g, code.number(4)), build.mul(g, code.number(4 * lanes))
        numbers = [code.at(x.numbers, build.mul(g, code.number(size))) for x in xs]
        sums = self._sums(tile, numbers)
        found = list(totals)
        for strip in range(STRIPS):
            gain_at = build.add(lane_at, code.number(strip * self.gain_strip))
            gain = code.load(code.registers(FLOAT), code.at(self.gains, gain_at), 4 * lanes)
            offset = None
            if self.has_offsets:
                offset = code.load(code.registers(FLOAT), code.at(self.offsets, gain_at), 4 * lanes)
            for r, x in enumerate(xs):
                n = r * STRIPS + strip
                found[n] = self._scaled(sums[n], gain, offset, code.at(x.scales, at), code.at(x.sums, at), found[n])
        return found

    def _sums(self, tile: Value, xs: Sequence[Value]) -> list[Value]:
        """Return the integer products codes . bytes of one group, ordered by activation row and then by strip, each
        int32 [lanes]."""
        code, lanes, kind = self.code, self.code.isa.lanes, self.codes
        sums = [code.dot_sum(kind.most, kind.is_signed) for _ in range(len(xs) * STRIPS)]
        words: list[Iterator[Value]] = []
        for k in range(0, self.layout.group, 4):
            if k % PIECE == 0:
                words = [self._words(code.at(x, k)) for x in xs]
            bytes_ = [next(each) for each in words]
            for strip in range(STRIPS):
                codes = code.load(
                    code.registers(BYTE, 4 * lanes), code.at(tile, strip * self.tile_strip + k * lanes), 4 * lanes
                )
                for r, x in enumerate(bytes_):
                    sums[r * STRIPS + strip].add(codes, x)
            for each in sums if self.by_pairs else ():
                each.pin()
        return [each.total() for each in sums]

    def _store_outputs(self, n: Value, strips: int) -> None:
        """Store the totals of the outputs from `n` on, plus bias, in bf16 for every activation row. Whole registers are
        stored where all their outputs exist, single numbers at the end."""
        code, build, lanes = self.code, self.code.build, self.code.isa.lanes
        left = build.sub(self.end, n)
        is_whole = build.icmp_signed(">=", left, code.number(strips * lanes))
        with build.if_else(is_whole) as (whole, part):
            with whole:
                self._store_each(n, code.number(strips * lanes), lanes)
            with part:
                self._store_each(n, left, 1)

    def _store_each(self, n: Value, count: Value, width: int) -> None:
        """Store `count` outputs from output `n` on for every activation row, `width` outputs at a time."""
        code, build = self.code, self.code.build

        def row(m: Value, _: list[Value]) -> list[Value]:
            totals = code.at(self.totals, build.mul(m, code.number(self.total_row)))
            out = code.load(POINTER, code.at(self.given, build.add(build.mul(m, code.number(16)), code.number(16))))

            def outputs(i: Value, _: list[Value]) -> list[Value]:
                place = build.mul(build.add(n, i), code.number(2))
                numbers = code.load(code.registers(FLOAT, width), code.at(totals, build.mul(i, code.number(4))), 4)
                code.store(code.rounded(code.biased(numbers, self.bias, place)), code.at(out, place), 2)
                return []

            code.loop(code.number(0), count, width, [], outputs)
            return []

        code.loop(code.number(0), self.rows, 1, [], row)
