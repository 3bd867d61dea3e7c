"""The tasks for one call of the kernel for experts (`experts.py`), for the threads of a pool (`tasks.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from smoe.kernels import tasks
from smoe.kernels.byte_layout import Layout
from smoe.kernels.many_rows import PackedProduct
from smoe.kernels.matrix import ByteFunctions, Matrix
from smoe.kernels.quantised_work import FEW_ROWS, LONE_UNIT, ROWS_OF_UNIT
from smoe.kernels.rows import passes
from smoe.kernels.spinning_pool import UNIT, RowLists

if TYPE_CHECKING:
    from smoe.kernels.experts import TokenExperts

SUM_UNIT = 512
"""The number of elements of a token's sum in a unit."""


class Expert(NamedTuple):
    """One expert's matrices, and the tokens that are routed to the expert."""

    matrices: Sequence[Matrix]
    """The matrices that together form the first product [2I, H] (gate, then up), followed by the matrix of the second
    product [H, I]."""
    places: Sequence[tuple[int, int]]
    """For each token of the expert, in transformers' order: (index of the token in x, index of the row for its
    outputs)."""


def packed_rows_bytes(shape: TokenExperts, expert: Expert) -> int:
    """Return the bytes of memory for the packed rows of an expert: first those of its tokens, and then, in their place,
    those of the gated activation; 0 if no rows are packed. Only many rows are, and only for bf16 matrices."""
    pool, tokens = shape.pool, len(expert.places)
    if pool.many is None or tokens <= pool.few_rows or not has_bf16(expert.matrices):
        return 0
    return pool.many.packed_bytes(tokens, max(shape.hidden, shape.inner))


def has_bf16(matrices: Sequence[Matrix]) -> bool:
    """Return whether one of the matrices is in bf16."""
    return any(matrix.products is None for matrix in matrices)


def byte_functions(matrices: Sequence[Matrix]) -> list[ByteFunctions]:
    """Return the functions for products in 8 bits, one for each matrix that is multiplied with 8-bit rows. Matrices
    that are multiplied with bf16 rows have none."""
    return [
        each.products.in_bytes for each in matrices if each.products is not None and each.products.in_bytes is not None
    ]


class ExpertWork:
    """The tasks for one call of the kernel, as a list of integers, and the memory to which they refer.

    The first product, the gates and the second product of an expert share one progress counter.
    """

    def __init__(
        self, shape: TokenExperts, x: int, rows: int, experts: Sequence[Expert], lists: RowLists | None = None
    ) -> None:
        """`x` and `rows` are the addresses of the tokens and of the outputs. `lists`: memory for lists of rows; None:
        that of the pool."""
        self.fields: list[int] = []
        self.units = 0
        self._shape = shape
        self._experts = experts
        self._size = UNIT if len(experts) > 1 else LONE_UNIT
        few = all(len(expert.places) <= FEW_ROWS for expert in experts)
        outputs = len(experts) * (2 * shape.inner + shape.hidden)
        self._byte_size = shape.pool.byte_unit(outputs) if few else self._size
        self._ups: list[int] = []
        """For each expert, the number of units of its first product."""
        self._counts = shape.pool.word(tasks.PROGRESS)
        self._x, self._out = x, rows
        self.layouts: dict[Layout, tuple[int, int, int]] = {}
        """For each layout of tokens in 8 bits: their address, the address of the counter of finished units, and the
        number of units."""
        self.prepared: dict[Layout, tuple[int, int, int]] = {}
        """The same as `layouts`, for tokens that an earlier `ExpertWork` has rounded."""
        self.byte_rows = 0
        """The bytes of all rows in 8 bits."""
        self._gated_byte_rows = 0
        """The address for the next gated rows in 8 bits."""
        self._kept: list[object] = []
        self._lists = shape.pool.row_lists if lists is None else lists
        self._packed: list[int] = []
        """For each expert, the address of memory for its packed rows; empty if no rows are packed."""

    def pack_rows(self, packed: int) -> None:
        """Pack rows of experts with many tokens (`many_rows.py`) in the memory at the address `packed`, which has
        the sum of all `packed_rows_bytes`."""
        sizes = [packed_rows_bytes(self._shape, expert) for expert in self._experts]
        self._packed = [packed + before for before in itertools.accumulate(sizes, initial=0)]

    def make_byte_rows(self, tokens: int) -> None:
        """Add tasks that round the tokens to 8 bits, in every layout that the first matrix product of an expert needs.
        Also reserve memory for gated rows in 8 bits."""
        hidden, pool = self._shape.hidden, self._shape.pool
        ups = {each.layout: each for expert in self._experts for each in byte_functions(expert.matrices[:-1])}
        sizes = [tokens * layout.nbytes(hidden) for layout in ups]
        self.byte_rows = sum(sizes) + self._gated_bytes
        at = pool.byte_rows(self.byte_rows)
        units = -(-tokens // ROWS_OF_UNIT)
        for n, (functions, size) in enumerate(zip(ups.values(), sizes, strict=True), start=len(self._experts)):
            done = pool.word(tasks.PROGRESS + n)
            self.fields += (self.units, tokens, ROWS_OF_UNIT, tasks.FORMAT, pool.at_once, 0, done, functions.rows)
            self.fields += (self._x, 0, at, hidden, 0)
            self.units += units
            self.layouts[functions.layout] = at, done, units
            at += size
        self._gated_byte_rows = at
        self._begin_row_lists(sum([len(expert.places) for expert in self._experts]))

    def take_byte_rows(self, prepared: Mapping[Layout, int], rows: int) -> None:
        """Use tokens that have been rounded to 8 bits already, at the addresses in `prepared`. `rows`: the number of
        rows of outputs, with those that this work only adds. Call either this method or `make_byte_rows`."""
        pool = self._shape.pool
        self.prepared = {layout: (at, pool.at_once, 0) for layout, at in prepared.items()}
        self._gated_byte_rows = pool.byte_rows(self._gated_bytes)
        self._begin_row_lists(rows)

    @property
    def _gated_bytes(self) -> int:
        """The size in bytes of the 8-bit rows after the gated activation, for all experts."""
        inner = self._shape.inner
        return sum(
            [
                len(expert.places) * each.layout.nbytes(inner)
                for expert in self._experts
                for each in byte_functions(expert.matrices[-1:])
            ]
        )

    def _begin_row_lists(self, rows: int) -> None:
        """Reserve memory for the lists of activation rows that machine code reads: one list for each matrix, and one
        list of all `rows` rows of outputs."""
        words = sum([len(expert.matrices) * (1 + 2 * len(expert.places)) for expert in self._experts])
        self._lists.begin(words + 1 + 2 * rows)

    def ups(self) -> None:
        """Add tasks for the first matrix product of every expert (gate and up). The results go to scratch memory,
        ordered by expert and then by row."""
        inner, hidden, x, at_once = self._shape.inner, self._shape.hidden, self._x, self._shape.pool.at_once
        wide, count = self._shape.wide_at, self._counts
        for n, (matrices, places) in enumerate(self._experts):
            before, column, byte_rows = self.units, wide, dict[Layout, list[int]]()
            for matrix in matrices[:-1]:
                if matrix.products is not None and matrix.products.in_bytes is not None:
                    layout = matrix.products.in_bytes.layout
                    if layout not in byte_rows:  # gate and up have the same rows
                        byte_rows[layout] = self._byte_rows_of(layout, places)
                    self._up_in_bytes(matrix, matrix.products.in_bytes, byte_rows[layout], column, count)
                elif len(places) == 1:
                    self._row(matrix, at_once, 0, count, x + 2 * hidden * places[0][0], column)
                else:
                    pairs = [(x + 2 * hidden * token, column + 4 * inner * i) for i, (token, _) in enumerate(places)]
                    self._rows(matrix, at_once, 0, count, pairs, (n, count))
                column += 2 * matrix.outputs
            self._ups.append(self.units - before)
            wide += 4 * inner * len(places)
            count += 8

    def _byte_rows_of(self, layout: Layout, places: Sequence[tuple[int, int]]) -> list[int]:
        """Return the addresses of an expert's tokens in 8 bits."""
        begin, _, _ = (self.prepared or self.layouts)[layout]
        stride = layout.nbytes(self._shape.hidden)
        return [begin + stride * token for token, _ in places]

    def _up_in_bytes(
        self, matrix: Matrix, functions: ByteFunctions, rows: Sequence[int], column: int, count: int
    ) -> None:
        _, done, units = (self.prepared or self.layouts)[functions.layout]
        wide = 4 * self._shape.inner
        outputs = range(column, column + wide * len(rows), wide)
        self._byte_products(matrix, functions, self._lists.add(rows, outputs), (done, units), count)

    def _down_in_bytes(
        self,
        matrix: Matrix,
        functions: ByteFunctions,
        places: Sequence[tuple[int, int]],
        wide: int,
        count: int,
        ups: int,
    ) -> None:
        """Add tasks that apply the gated activation and round the results to 8 bits, and tasks that multiply the
        rounded rows with the second matrix."""
        shape, rows, size = self._shape, self._gated_byte_rows, min(len(places), ROWS_OF_UNIT)
        self.fields += (self.units, len(places), size, tasks.FORMAT, count, ups, count, functions.gated_rows)
        self.fields += (wide, shape.table_at, rows, shape.inner, 0)
        units = -(-len(places) // size)
        self.units += units
        stride, out, out_bytes = functions.layout.nbytes(shape.inner), self._out, 2 * shape.hidden
        self._gated_byte_rows += stride * len(places)
        outputs = [out + out_bytes * row for _, row in places]
        given = self._lists.add(range(rows, self._gated_byte_rows, stride), outputs)
        self._byte_products(matrix, functions, given, (count, ups + units), shape.pool.nowhere)

    def _byte_products(
        self,
        matrix: Matrix,
        functions: ByteFunctions,
        given: int,
        wait: tuple[int, int],
        count_at: int,
    ) -> None:
        """Add tasks that multiply a matrix with rows in 8 bits. `given`: the address of the list of rows."""
        self.fields += (self.units, matrix.outputs, self._byte_size, tasks.FORMAT, *wait, count_at, functions.products)
        self.fields += (given, matrix.address, 0, matrix.columns, 0)
        self.units += -(-matrix.outputs // self._byte_size)

    def downs(self) -> None:
        """Add tasks for the gated activation and the second matrix product of every expert."""
        shape, fields, out = self._shape, self.fields, self._out
        hidden, inner, nowhere, table = shape.hidden, shape.inner, shape.pool.nowhere, shape.table_at
        wide, gated, count = shape.wide_at, shape.gated_at, self._counts
        for n, ((matrices, places), ups) in enumerate(zip(self._experts, self._ups, strict=True)):
            products = matrices[-1].products
            if products is not None and products.in_bytes is not None:
                self._down_in_bytes(matrices[-1], products.in_bytes, places, wide, count, ups)
                wide += 4 * inner * len(places)
                count += 8
                continue
            first = gated
            for _ in places:
                fields += (self.units, inner, inner, tasks.GATE, count, ups, count, wide, table, gated, inner, 0, 0)
                self.units += 1
                wide += 4 * inner
                gated += 2 * inner
            need = ups + len(places)
            if len(places) == 1:
                self._row(matrices[-1], count, need, nowhere, first, out + 2 * hidden * places[0][1])
            else:
                pairs = [(first + 2 * inner * i, out + 2 * hidden * row) for i, (_, row) in enumerate(places)]
                self._rows(matrices[-1], count, need, nowhere, pairs, (n, count))
            count += 8

    def _row(self, matrix: Matrix, wait_at: int, wait_for: int, count_at: int, x: int, out: int) -> None:
        """Add tasks that multiply a matrix with one activation row."""
        address, outputs, columns, products = matrix
        size, products = self._size, products or self._shape.pool.own_order
        if products is None:
            self.fields += (self.units, outputs, size, tasks.PRODUCT, wait_at, wait_for, count_at)
            self.fields += (x, address, out, 0, columns, columns)
        else:
            self.fields += (self.units, outputs, size, tasks.FORMAT, wait_at, wait_for, count_at)
            self.fields += (products.of_rows[0], x, address, out, columns, 0)
        self.units += -(-outputs // size)

    def _rows(
        self,
        matrix: Matrix,
        wait_at: int,
        wait_for: int,
        count_at: int,
        pairs: Sequence[tuple[int, int]],
        expert: tuple[int, int],
    ) -> None:
        """Add tasks that multiply a matrix with several activation rows. `pairs`: for each row, its address and that of
        its outputs. `expert`: the number of the expert, and the address of its counter."""
        many, (n, packed_at) = self._shape.pool.many, expert
        if many is not None and self._packed and matrix.products is None and len(pairs) > self._shape.pool.few_rows:
            given = self._lists.add(*zip(*pairs, strict=True))
            task = PackedProduct(matrix, given, len(pairs), self._packed[n], wait_at, wait_for, packed_at)
            fields, units = many.fields(task, self.units, count_at)
            self.fields += fields
            self.units += units
            return
        address, outputs, columns, products = matrix
        size, products = self._size, products or self._shape.pool.own_order
        if products is not None and self._shape.pool.rows_are_alone:
            for pair in pairs:
                self._row(matrix, wait_at, wait_for, count_at, *pair)
            return
        for rows in passes(pairs):
            self._kept.append(rows)
            if products is None:
                self.fields += (self.units, outputs, size, tasks.ROWS, wait_at, wait_for, count_at)
                chain = self._shape.pool.chain(columns, len(pairs))
                self.fields += (rows.address, address, 0, rows.count, columns, chain)
            else:
                self.fields += (self.units, outputs, size, tasks.FORMAT, wait_at, wait_for, count_at)
                self.fields += (products.of_rows[rows.count // 2], rows.address, address, 0, columns, 0)
            self.units += -(-outputs // size)

    def add_rows(self, function: int, gains: int, totals: Sequence[int]) -> None:
        """Add a task that begins after all products. It adds each row of outputs, times the row's gain, to the total
        whose address is the row's entry in `totals`."""
        pool, hidden, before = self._shape.pool, self._shape.hidden, self.units
        rows = range(self._out, self._out + 2 * hidden * len(totals), 2 * hidden)
        given = self._lists.add(rows, totals)
        self.fields += (self.units, hidden, SUM_UNIT, tasks.FORMAT, pool.finished, before, pool.nowhere, function)
        self.fields += (given, gains, 0, hidden, 0)
        self.units += -(-hidden // SUM_UNIT)

    def sums(self, spans: Sequence[tuple[int, int]], gains: int, out: int) -> None:
        """Add tasks that compute the weighted sums of tokens after all products. `spans` is as in `Sums`; `gains` and
        `out` are addresses."""
        pool, hidden, before = self._shape.pool, self._shape.hidden, self.units
        for token, (first, count) in enumerate(spans):
            if count:
                self.fields += (self.units, hidden, SUM_UNIT, tasks.COMBINE, pool.finished, before, pool.nowhere)
                self.fields += (self._out + 2 * hidden * first, gains + 4 * first, out + 2 * hidden * token)
                self.fields += (count, hidden, 0)
                self.units += -(-hidden // SUM_UNIT)
