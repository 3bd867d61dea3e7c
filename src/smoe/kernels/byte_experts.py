"""The tasks for many tokens through experts whose activation rows are all in 8 bits, made as arrays.

`ExpertWork` makes the same tasks for experts of any format, one by one. For a prompt of 16 tokens that takes 0.43 ms a
layer in Python, and with arrays 0.19 ms (docs/log/kernels.md).

The numbers of the tokens' rows follow each other, expert by expert. Every matrix of an expert has one list of rows
(`RowLists`), and all lists of one matrix follow each other, too:

    lists of gate      3, row, product, row, product, row, product | 1, row, product | 2, ...
    lists of up        ...
    lists of down      ...
    list of all rows   for the sums
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from smoe.bounds import INT8
from smoe.kernels import tasks
from smoe.kernels.byte_layout import Layout
from smoe.kernels.expert_work import SUM_UNIT
from smoe.kernels.matrix import ByteFunctions, Matrix, added_rows
from smoe.kernels.quantised_work import FEW_ROWS, LONE_UNIT, ROWS_OF_UNIT
from smoe.kernels.spinning_pool import UNIT

if TYPE_CHECKING:
    from smoe.kernels.experts import TokenExperts

Words = npt.NDArray[np.int64]


class RoutedRows(NamedTuple):
    """The tokens of some experts, expert after expert. Each has a row, n in all."""

    counts: Words
    """For each expert, the number of its tokens, [experts]."""
    tokens: Words
    """The index of the token of every row, [n]."""
    gains: npt.NDArray[np.float32]
    """The routing weight of every row, [n]."""


class RowMemory(NamedTuple):
    """Addresses of rows."""

    byte_rows: Mapping[Layout, int]
    """The tokens in 8 bits, in every layout that the experts need."""
    outputs: int
    """The rows for the experts' outputs, in bf16."""
    totals: int
    """The sums of the tokens, in float32, to which the weighted outputs are added."""


def functions_of_all(experts: Sequence[Sequence[Matrix]]) -> list[ByteFunctions] | None:
    """Return the functions that multiply the first, second, ... matrix of every expert. Return None if experts differ
    in their formats, or if a matrix is not multiplied with rows in 8 bits."""
    products = [matrix.products for matrix in experts[0]]
    functions = [each.in_bytes for each in products if each is not None and each.in_bytes is not None]
    if not functions or len(functions) < len(products):
        return None
    alike = all([matrix.products for matrix in matrices] == products for matrices in experts)
    return functions if alike else None


class ByteExperts:
    """The tasks of one job: products, gates and weighted sums of some experts, and the memory to which they refer."""

    def __init__(
        self,
        shape: TokenExperts,
        experts: Sequence[Sequence[Matrix]],
        functions: Sequence[ByteFunctions],
        routed: RoutedRows,
        memory: RowMemory,
    ) -> None:
        """`experts`: for each expert its matrices. `functions`: their functions (`functions_of_all`)."""
        self._shape, self._experts, self._functions = shape, experts, functions
        self._routed, self._memory = routed, memory
        count, rows = len(experts), len(routed.tokens)
        self._first = routed.counts.cumsum() - routed.counts
        """For each expert, the number of its first row."""
        shape.reserve(rows)
        self._gated_bytes = functions[-1].layout.nbytes(shape.inner)
        self._gated = shape.pool.byte_rows(rows * self._gated_bytes)
        few = bool((routed.counts <= FEW_ROWS).all())
        outputs = count * (2 * shape.inner + shape.hidden)
        self._size = shape.pool.byte_unit(outputs) if few else UNIT if count > 1 else LONE_UNIT
        self._counters = shape.pool.word(tasks.PROGRESS) + 8 * np.arange(count)
        """For each expert, the address of the counter of its finished units."""
        self._addresses = np.fromiter(
            (matrix.address for matrix in chain.from_iterable(experts)), np.int64, count * len(functions)
        ).reshape(count, -1)
        self._lists, self._sums = self._row_lists(count, rows)
        begins = np.arange(len(functions)) * self._lists.shape[1] + (np.arange(count) + 2 * self._first)[:, None]
        self._list_addresses = self._lists.ctypes.data + 8 * begins
        """For each expert and matrix, the address of its list."""
        self.fields, self.units = self._tasks(count)
        """The tasks [tasks, FIELDS], and the number of their units."""

    def run(self) -> None:
        """Compute the tasks on the threads of the pool."""
        shape, fields, count = self._shape, self.fields, len(self._experts)
        shape.pool.run_packed(fields.ctypes.data, fields.nbytes, self.units, shape.is_long(count), count)

    def _row_lists(self, count: int, rows: int) -> tuple[Words, Words]:
        """Return the lists of rows of every matrix [matrices, words], and the list of the sums [1 + 2 * rows]."""
        shape, (counts, tokens, _), (byte_rows, outputs, totals) = self._shape, self._routed, self._memory
        matrices, row = len(self._functions), np.arange(rows)
        starts = np.arange(count) + 2 * self._first
        places = np.arange(count).repeat(counts) + 2 * row + 1
        lists, sums = np.empty((matrices, count + 2 * rows), np.int64), np.empty(1 + 2 * rows, np.int64)
        lists[:, starts] = counts
        column = shape.wide_at
        for n, functions in enumerate(self._functions[:-1]):
            layout = functions.layout
            lists[n, places] = byte_rows[layout] + layout.nbytes(shape.hidden) * tokens
            lists[n, places + 1] = column + 4 * shape.inner * row
            column += 2 * self._experts[0][n].outputs
        lists[-1, places] = self._gated + self._gated_bytes * row
        written = outputs + 2 * shape.hidden * row
        lists[-1, places + 1] = written
        sums[0], sums[1::2], sums[2::2] = rows, written, totals + 4 * shape.hidden * tokens
        return lists, sums

    def _tasks(self, count: int) -> tuple[Words, int]:
        """Return the tasks [tasks, FIELDS] and the number of their units: the first product of every expert, then gate
        and second product of every expert, then the sums."""
        pool, ups = self._shape.pool, len(self._functions) - 1
        fields = np.zeros((count * (ups + 2) + 1, tasks.FIELDS), np.int64)
        fields[:, 2], fields[:, 3], fields[:, 6] = self._size, tasks.FORMAT, pool.nowhere
        of_up = self._ups(fields[: count * ups].reshape(count, ups, -1))
        units = self._downs(fields[count * ups : -1].reshape(count, 2, -1), count * of_up, of_up)
        hidden, function = self._shape.hidden, added_rows(INT8)
        row = (units, hidden, SUM_UNIT, tasks.FORMAT, pool.finished, units, pool.nowhere, function)
        fields[-1] = (*row, self._sums.ctypes.data, self._routed.gains.ctypes.data, 0, hidden, 0)
        return fields, units + -(-hidden // SUM_UNIT)

    def _ups(self, fields: Words) -> int:
        """Write the tasks of the first products to `fields` [experts, matrices, FIELDS]. Return the units of one
        expert."""
        units = 0
        begins = np.arange(len(fields))
        numbers = [-(-matrix.outputs // self._size) for matrix in self._experts[0][:-1]]
        for n, (matrix, functions) in enumerate(zip(self._experts[0], self._functions[:-1], strict=False)):
            fields[:, n, 0] = begins * sum(numbers) + units
            fields[:, n, 1], fields[:, n, 7], fields[:, n, 11] = matrix.outputs, functions.products, matrix.columns
            units += numbers[n]
        fields[:, :, 4], fields[:, :, 6] = self._shape.pool.at_once, self._counters[:, None]
        fields[:, :, 8], fields[:, :, 9] = self._list_addresses[:, :-1], self._addresses[:, :-1]
        return units

    def _downs(self, fields: Words, begin: int, ups: int) -> int:
        """Write the tasks of the gated activation and of the second products to `fields` [experts, 2, FIELDS]. `begin`:
        the number of their first unit; `ups`: the units of an expert's first product. Return the number of all
        units."""
        shape, counts, matrix, functions = self._shape, self._routed.counts, self._experts[0][-1], self._functions[-1]
        sizes = np.minimum(counts, ROWS_OF_UNIT)
        rounding, products = -(-counts // sizes), -(-matrix.outputs // self._size)
        begins = begin + (rounding + products).cumsum() - (rounding + products)
        gate, product = fields[:, 0], fields[:, 1]
        gate[:, 0], gate[:, 1], gate[:, 2] = begins, counts, sizes
        gate[:, 4], gate[:, 5], gate[:, 6], gate[:, 7] = self._counters, ups, self._counters, functions.gated_rows
        gate[:, 8], gate[:, 9] = shape.wide_at + 4 * shape.inner * self._first, shape.table_at
        gate[:, 10], gate[:, 11] = self._gated + self._gated_bytes * self._first, shape.inner
        product[:, 0], product[:, 1] = begins + rounding, matrix.outputs
        product[:, 4], product[:, 5], product[:, 7] = self._counters, ups + rounding, functions.products
        product[:, 8], product[:, 9] = self._list_addresses[:, -1], self._addresses[:, -1]
        product[:, 11] = matrix.columns
        return begin + int(rounding.sum()) + len(counts) * products
