"""Computes tokens through their experts in one call of machine code: products, activation and weighted sum.

The work is divided into units, in this order (the numbers are those of experts):

    up 0 | up 1 | ... | gate 0 | down 0 | gate 1 | down 1 | ... | sum

Every thread takes the next unit. A unit that needs the result of another thread waits for it in machine code. So no
thread sleeps within a layer, and Python is called only once. The bits are those of torch's separate operations (grade
E0): `row_product.py` computes the products and `elementwise.py` the rest. Both are compared with torch on the model's
own experts when a model is loaded. A pool with its own order of sums (`own_order.py`) uses that order for the products
(grade E1).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from smoe.kernels import tasks
from smoe.kernels.byte_layout import Layout
from smoe.kernels.matrix import ByteFunctions, Matrix
from smoe.kernels.quantised_work import FEW_ROWS, LONE_UNIT, MOST_QUANTISED_ROWS, ROWS_OF_UNIT
from smoe.kernels.rows import MOST_ROWS, passes
from smoe.kernels.spinning_pool import UNIT, WAKING_WEIGHTS, RowLists, SpinningPool

if TYPE_CHECKING:
    import torch

Bits: TypeAlias = npt.NDArray[np.uint16]
"""bf16 numbers as an array of 16-bit integers, for processes without torch."""
_NO_ROWS = np.empty((0, 0), np.uint16)
MOST_EXPERTS = 128
"""The largest number of experts in one call; each has a progress counter."""
MOST_TOKENS = tasks.MOST_TASKS - MOST_EXPERTS * (MOST_QUANTISED_ROWS + 3 * (MOST_QUANTISED_ROWS // MOST_ROWS))
"""The largest number of tokens in one call. Each token needs a sum; each expert needs a gate per row, and three
products in several passes."""
_SUM_UNIT = 512


class Expert(NamedTuple):
    """One expert's matrices, and the tokens that are routed to the expert."""

    matrices: Sequence[Matrix]
    """The matrices that together form the first product [2I, H] (gate, then up), followed by the matrix of the second
    product [H, I]."""
    places: Sequence[tuple[int, int]]
    """For each token of the expert, in transformers' order: (index of the token in x, index of the row for its
    outputs)."""


class Sums(NamedTuple):
    """The weighted sums over the experts of each token, which are computed after all products."""

    gains: Sequence[float]
    """The routing weight of every row of the outputs."""
    spans: Sequence[tuple[int, int]]
    """For every token: its first row and its number of rows. For a token without rows, `out` does not change."""
    out: torch.Tensor
    """The weighted sums, [T, H]."""


class TokenExperts:
    """The kernel for experts of one shape: hidden size `hidden`, inner size `inner`, and the activation as a table
    (bf16 [65536]).

    bf16 numbers are a tensor, or `Bits` without torch.
    """

    def __init__(
        self, pool: SpinningPool, hidden: int, inner: int, table: torch.Tensor | Bits, most_rows: int = 1
    ) -> None:
        """`most_rows`: the largest number of tokens of one expert. It is above 1 if a test has shown that several rows
        have torch's bits."""
        self.pool = pool
        self.hidden = hidden
        self.inner = inner
        self.table_at = _address(table)
        self.table: Any = table
        self.most_rows = most_rows
        self._wide = self._gated = _NO_ROWS
        self.wide_at = self.gated_at = 0
        """The addresses of the memory for values between the products, before and after the gate."""
        self.reserve(8)
        self._prepared: dict[tuple[int, ...], PreparedToken] = {}

    def reserve(self, rows: int) -> None:
        """Allocate the memory for the values of `rows` rows between the products."""
        if rows > self._wide.shape[0]:
            self._wide = np.empty((rows, 2 * self.inner), np.uint16)
            self._gated = np.empty((rows, self.inner), np.uint16)
            self.wide_at, self.gated_at = _address(self._wide), _address(self._gated)

    def forward(
        self, x: torch.Tensor | Bits, experts: Sequence[Expert], rows: torch.Tensor | Bits, sums: Sums | None = None
    ) -> None:
        """Compute tokens x [T, H] through at most `MOST_EXPERTS` experts, and write each expert's outputs to `rows` [n,
        H].

        With `sums`, also write the weighted sum of each token's rows to `sums.out`, added in ascending order. All
        tensors are contiguous and in bf16.
        """
        self.reserve(sum([len(expert.places) for expert in experts]))
        work = ExpertWork(self, _address(x), _address(rows), experts)
        work.make_byte_rows(len(x))
        work.ups()
        work.downs()
        if sums is not None:
            gains = (ctypes.c_float * len(sums.gains))(*sums.gains)
            work.sums(sums.spans, ctypes.addressof(gains), sums.out.data_ptr())
        self.run(work, len(experts))

    def one_token(
        self, x: torch.Tensor, experts: Sequence[Sequence[Matrix]], gains: Sequence[float], out: torch.Tensor
    ) -> None:
        """Compute one token x [1, H] through experts, given by their matrices, and write the sum of their outputs to
        `out` [1, H]. The outputs are weighted by `gains` and added in the order of `experts`.

        Both tensors are contiguous and in bf16.
        """
        formats = tuple([id(matrix.products) for matrices in experts for matrix in matrices])
        prepared = self._prepared.get(formats)
        if prepared is None or not prepared.is_current:
            prepared = self._prepared[formats] = PreparedToken(self, experts)
        addresses = [matrix.address for matrices in experts for matrix in matrices]
        prepared.run(x.data_ptr(), addresses, gains, out.data_ptr())

    def run(self, work: ExpertWork, experts: int) -> None:
        """Run the tasks in `work` on the threads of the pool. `experts`: the number of experts to which the tasks
        belong."""
        is_long = 3 * self.inner * self.hidden * experts >= WAKING_WEIGHTS
        self.pool.run(work.fields, work.units, is_long, counts=experts + len(work.layouts))


def byte_functions(matrices: Sequence[Matrix]) -> list[ByteFunctions]:
    """Return the functions for products in 8 bits, one for each matrix that is multiplied with 8-bit rows. Matrices
    that are multiplied with bf16 rows have none."""
    return [
        each.products.in_bytes for each in matrices if each.products is not None and each.products.in_bytes is not None
    ]


def _address(numbers: torch.Tensor | Bits) -> int:
    at: Any = numbers.ctypes.data if isinstance(numbers, np.ndarray) else numbers.data_ptr()
    return int(at)


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
        self._begin_row_lists()

    def take_byte_rows(self, prepared: Mapping[Layout, int]) -> None:
        """Use tokens that have been rounded to 8 bits already, at the addresses in `prepared`. Call either this method
        or `make_byte_rows`."""
        pool = self._shape.pool
        self.prepared = {layout: (at, pool.at_once, 0) for layout, at in prepared.items()}
        self._gated_byte_rows = pool.byte_rows(self._gated_bytes)
        self._begin_row_lists()

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

    def _begin_row_lists(self) -> None:
        """Reserve memory for the lists of activation rows that machine code reads: one list for each matrix, and one
        list of all rows."""
        counts = [(len(expert.matrices), len(expert.places)) for expert in self._experts]
        words = sum([matrices * (1 + 2 * rows) for matrices, rows in counts])
        self._lists.begin(words + 1 + 2 * sum([rows for _, rows in counts]))

    def ups(self) -> None:
        """Add tasks for the first matrix product of every expert (gate and up). The results go to scratch memory,
        ordered by expert and then by row."""
        inner, hidden, x, at_once = self._shape.inner, self._shape.hidden, self._x, self._shape.pool.at_once
        wide, count = self._shape.wide_at, self._counts
        for matrices, places in self._experts:
            before, column = self.units, wide
            for matrix in matrices[:-1]:
                if matrix.products is not None and matrix.products.in_bytes is not None:
                    self._up_in_bytes(matrix, matrix.products.in_bytes, places, column, count)
                elif len(places) == 1:
                    self._row(matrix, at_once, 0, count, x + 2 * hidden * places[0][0], column)
                else:
                    pairs = [(x + 2 * hidden * token, column + 4 * inner * i) for i, (token, _) in enumerate(places)]
                    self._rows(matrix, at_once, 0, count, pairs)
                column += 2 * matrix.outputs
            self._ups.append(self.units - before)
            wide += 4 * inner * len(places)
            count += 8

    def _up_in_bytes(
        self, matrix: Matrix, functions: ByteFunctions, places: Sequence[tuple[int, int]], column: int, count: int
    ) -> None:
        rows, done, units = (self.prepared or self.layouts)[functions.layout]
        stride, wide = functions.layout.nbytes(matrix.columns), 4 * self._shape.inner
        pairs = [(rows + stride * token, column + wide * i) for i, (token, _) in enumerate(places)]
        self._byte_products(matrix, functions, pairs, (done, units), count)

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
        stride = functions.layout.nbytes(shape.inner)
        self._gated_byte_rows += stride * len(places)
        pairs = [(rows + stride * i, self._out + 2 * shape.hidden * row) for i, (_, row) in enumerate(places)]
        self._byte_products(matrix, functions, pairs, (count, ups + units), shape.pool.nowhere)

    def _byte_products(
        self,
        matrix: Matrix,
        functions: ByteFunctions,
        pairs: Sequence[tuple[int, int]],
        wait: tuple[int, int],
        count_at: int,
    ) -> None:
        given = self._lists.add(pairs)
        self.fields += (self.units, matrix.outputs, self._byte_size, tasks.FORMAT, *wait, count_at, functions.products)
        self.fields += (given, matrix.address, 0, matrix.columns, 0)
        self.units += -(-matrix.outputs // self._byte_size)

    def downs(self) -> None:
        """Add tasks for the gated activation and the second matrix product of every expert."""
        shape, fields, out = self._shape, self.fields, self._out
        hidden, inner, nowhere, table = shape.hidden, shape.inner, shape.pool.nowhere, shape.table_at
        wide, gated, count = shape.wide_at, shape.gated_at, self._counts
        for (matrices, places), ups in zip(self._experts, self._ups, strict=True):
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
                self._rows(matrices[-1], count, need, nowhere, pairs)
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
        self, matrix: Matrix, wait_at: int, wait_for: int, count_at: int, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Add tasks that multiply a matrix with several activation rows. `pairs`: for each row, its address and that of
        its outputs."""
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
        given = self._lists.add([(self._out + 2 * hidden * n, total) for n, total in enumerate(totals)])
        self.fields += (self.units, hidden, _SUM_UNIT, tasks.FORMAT, pool.finished, before, pool.nowhere, function)
        self.fields += (given, gains, 0, hidden, 0)
        self.units += -(-hidden // _SUM_UNIT)

    def sums(self, spans: Sequence[tuple[int, int]], gains: int, out: int) -> None:
        """Add tasks that compute the weighted sums of tokens after all products. `spans` is as in `Sums`; `gains` and
        `out` are addresses."""
        pool, hidden, before = self._shape.pool, self._shape.hidden, self.units
        for token, (first, count) in enumerate(spans):
            if count:
                self.fields += (self.units, hidden, _SUM_UNIT, tasks.COMBINE, pool.finished, before, pool.nowhere)
                self.fields += (self._out + 2 * hidden * first, gains + 4 * first, out + 2 * hidden * token)
                self.fields += (count, hidden, 0)
                self.units += -(-hidden // _SUM_UNIT)


_X, _OUT, _FIRST = 1 << 50, 1 << 51, 1 << 52
"""Placeholders in tasks for three addresses: that of the token, that of its sum, and that of the first matrix of its
experts."""


class PreparedToken:
    """The tasks for the experts of one token, with placeholders for addresses. They are reused for other experts whose
    matrices have the same formats.

    Making tasks in Python takes a fifth of the time of the products.
    """

    def __init__(self, shape: TokenExperts, experts: Sequence[Sequence[Matrix]], gains_at: int | None = None) -> None:
        """`gains_at`: the address of the experts' gains, float32, which the caller writes; None: `run` takes the gains
        as an argument."""
        count = len(experts)
        shape.reserve(count)
        self._shape, self._count = shape, count
        self._rows = np.empty((count, shape.hidden), np.uint16)
        self._gains, self._lists = (ctypes.c_float * count)(), RowLists()
        number = itertools.count(_FIRST)
        marked = [[matrix._replace(address=next(number)) for matrix in matrices] for matrices in experts]
        chosen = [Expert(matrices, [(0, n)]) for n, matrices in enumerate(marked)]
        work = ExpertWork(shape, _X, _address(self._rows), chosen, self._lists)
        work.make_byte_rows(1)
        work.ups()
        work.downs()
        work.sums([(0, count)], ctypes.addressof(self._gains) if gains_at is None else gains_at, _OUT)
        self._work = work
        self._memory = self._places()
        self._fields = np.array(work.fields, np.int64)
        self._at_x, self._at_out = np.flatnonzero(self._fields == _X), np.flatnonzero(self._fields == _OUT)
        self._at_matrices = np.flatnonzero(self._fields >= _FIRST)
        self._order = (self._fields[self._at_matrices] - _FIRST).tolist()
        self._fields_at = self._fields.ctypes.data
        self._is_long = 3 * shape.inner * shape.hidden * count >= WAKING_WEIGHTS
        self._counts = count + len(work.layouts)

    def _places(self) -> tuple[int, int, int]:
        """Return the current addresses of the scratch memory to which the tasks refer."""
        return self._shape.pool.byte_rows(self._work.byte_rows), self._shape.wide_at, self._shape.gated_at

    @property
    def is_current(self) -> bool:
        """Whether the scratch memory is still at the addresses that the tasks contain."""
        return self._places() == self._memory

    def run(self, x: int, matrices: Sequence[int], gains: Sequence[float], out: int) -> None:
        """Run the tasks for a token. `x`, `matrices` and `out` are the addresses of the token, of its experts' matrices
        and of the sum."""
        self._fields[self._at_matrices] = [matrices[n] for n in self._order]
        self._gains[:] = list(gains)
        self.run_completed(x, out)

    def places(self) -> list[tuple[int, int]]:
        """Return for each task field that contains the address of a matrix: (address of the field, index of the
        matrix). The index counts the matrices of all experts in their order."""
        return [(self._fields_at + 8 * int(field), n) for field, n in zip(self._at_matrices, self._order, strict=True)]

    def run_completed(self, x: int, out: int) -> None:
        """Run the tasks for the token at the address `x`, and write the sum of its experts' outputs to the address
        `out`. The tasks must already contain the addresses of the matrices and the routing weights."""
        fields = self._fields
        fields[self._at_x], fields[self._at_out] = x, out
        self._shape.pool.run_packed(self._fields_at, fields.nbytes, self._work.units, self._is_long, self._counts)
