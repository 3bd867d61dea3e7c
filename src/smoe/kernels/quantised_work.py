"""The tasks of a product with quantised matrices, which the threads of a pool carry out (`tasks.py`).

rows of bf16     one row a task, or passes of up to four
rows in 8 bits   tasks that make them, which the tasks of all matrices wait for; then any number of rows at once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from smoe.kernels import tasks
from smoe.kernels.byte_layout import Layout
from smoe.kernels.matrix import ByteFunctions, Matrix
from smoe.kernels.rows import RowList, passes

if TYPE_CHECKING:
    import torch

    from smoe.kernels.spinning_pool import SpinningPool

LONE_UNIT = 128
"""Outputs in a unit of a single product, of which the last unit would else be waited for."""
MOST_QUANTISED_ROWS = 32
"""Rows of bf16 that a quantised matrix is multiplied with, in passes of `MOST_ROWS`: for more it takes less time to
unpack the matrix once."""
MOST_BYTE_ROWS = 4096
"""Of rows in 8 bits: their sums take 64 bytes each of a thread's stack."""
ROWS_OF_UNIT = 4
"""Rows that are rounded to 8 bits in a unit."""


def most_quantised_rows(matrices: Sequence[Matrix]) -> int:
    """Rows that quantised matrices are multiplied with at once, at most."""
    in_bytes = all(each.products is not None and each.products.in_bytes is not None for each in matrices)
    return MOST_BYTE_ROWS if in_bytes else MOST_QUANTISED_ROWS


class QuantisedWork:
    """The tasks of one product with quantised matrices, and the memory that they refer to."""

    def __init__(self, pool: SpinningPool, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.fields: list[int] = []
        self.units = self.weights = 0
        self.layouts: dict[Layout, tuple[int, int, int]] = {}
        """Of rows in 8 bits: where they are, the word that counts units done, and how many there are."""
        self._pool, self._rows = pool, x.shape[0]
        self._x, self._out, self._out_stride = x.data_ptr(), out.data_ptr(), 2 * out.shape[1]
        self._bias = 0 if bias is None else bias.data_ptr()
        self._column = 0
        self._referred: list[object] = []

    def make_byte_rows(self, matrices: Sequence[Matrix]) -> None:
        """The rows in 8 bits, in every layout that one of the matrices needs."""
        functions = {
            each.products.in_bytes.layout: (each.products.in_bytes.rows, each.columns)
            for each in matrices
            if each.products is not None and each.products.in_bytes is not None
        }
        sizes = [self._rows * layout.nbytes(columns) for layout, (_, columns) in functions.items()]
        at, pool, units = self._pool.byte_rows(sum(sizes)), self._pool, -(-self._rows // ROWS_OF_UNIT)
        for n, ((layout, (function, columns)), size) in enumerate(zip(functions.items(), sizes, strict=True)):
            done = pool.word(tasks.PROGRESS + n)
            self.fields += (self.units, self._rows, ROWS_OF_UNIT, tasks.FORMAT, pool.at_once, 0, done, function)
            self.fields += (self._x, 0, at, columns, 0)
            self.units += units
            self.layouts[layout] = at, done, units
            at += size

    def add(self, matrix: Matrix) -> None:
        """One more matrix, whose outputs come behind those of the matrix before."""
        _, outputs, columns, products = matrix
        assert products is not None
        if products.in_bytes is not None:
            self._in_bytes(matrix, products.in_bytes)
        elif self._rows == 1 or self._pool.rows_are_alone:
            for n in range(self._rows):
                self._task(matrix, products.of_rows[0], self._x + 2 * columns * n, self._to(n), self._bias_here)
        else:
            assert not self._bias and self._rows <= MOST_QUANTISED_ROWS, self._rows
            for pairs in passes([(self._x + 2 * columns * n, self._to(n)) for n in range(self._rows)]):
                self._referred.append(pairs)
                self._task(matrix, products.of_rows[pairs.count // 2], pairs.address, 0, 0)
        self.weights += outputs * columns
        self._column += outputs

    def _in_bytes(self, matrix: Matrix, functions: ByteFunctions) -> None:
        rows, done, units = self.layouts[functions.layout]
        stride = functions.layout.nbytes(matrix.columns)
        given = RowList([(rows + stride * n, self._to(n)) for n in range(self._rows)])
        self._referred.append(given)
        self._task(matrix, functions.products, given.address, 0, self._bias_here, (done, units))

    def _task(
        self, matrix: Matrix, function: int, x: int, out: int, bias: int, wait: tuple[int, int] | None = None
    ) -> None:
        wait_at, wait_for = wait or (self._pool.at_once, 0)
        self.fields += (self.units, matrix.outputs, LONE_UNIT, tasks.FORMAT, wait_at, wait_for, self._pool.nowhere)
        self.fields += (function, x, matrix.address, out, matrix.columns, bias)
        self.units += -(-matrix.outputs // LONE_UNIT)

    def _to(self, row: int) -> int:
        """Where the outputs of a row go."""
        return self._out + self._out_stride * row + 2 * self._column

    @property
    def _bias_here(self) -> int:
        return self._bias + 2 * self._column if self._bias else 0
