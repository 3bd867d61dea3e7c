"""The tasks of products with quantized matrices, for the threads of a pool (`tasks.py`).

rows of bf16      one row per task, or several in passes of up to four
rows in 8 bits    first, tasks that round them, for which the tasks of all matrices wait; then any number together
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from smoe.kernels import tasks
from smoe.kernels.byte_layout import Layout
from smoe.kernels.matrix import Matrix
from smoe.kernels.rows import passes

if TYPE_CHECKING:
    import torch

    from smoe.kernels.spinning_pool import SpinningPool

LONE_UNIT = 128
"""The number of outputs in a unit of a single product. It is small, because all threads wait for the last unit."""
FEW_ROWS = 4
"""The largest number of rows for which reading the matrix takes longer than multiplying."""
MOST_QUANTISED_ROWS = 32
"""The largest number of bf16 rows that our kernels multiply, in passes of `MOST_ROWS`. For more rows, dequantizing the
matrix once is faster."""
MOST_BYTE_ROWS = 4096
"""The largest number of rows in 8 bits; each needs 64 bytes on a thread's stack."""
ROWS_OF_UNIT = 4
"""The number of rows that one unit rounds to 8 bits."""


def most_quantised_rows(matrices: Sequence[Matrix]) -> int:
    """Return the largest number of activation rows with which these quantized matrices can be multiplied at once."""
    in_bytes = all(each.products is not None and each.products.in_bytes is not None for each in matrices)
    return MOST_BYTE_ROWS if in_bytes else MOST_QUANTISED_ROWS


class Target(NamedTuple):
    """A quantized matrix, and the address where its products with all activation rows are written."""

    matrix: Matrix
    out: int
    """The address of the first row's outputs, in bf16."""
    stride: int
    """The number of bytes from the outputs of one row to those of the next."""
    bias: int = 0
    """The address of the bias, one number per output; 0 for none."""


class QuantisedWork:
    """The tasks of one product of activation rows with quantized matrices, and the memory to which the tasks refer."""

    def __init__(self, pool: SpinningPool, x: torch.Tensor, targets: Sequence[Target]) -> None:
        """`x`: the activation rows [M, K], in bf16 and contiguous."""
        self.fields: list[int] = []
        self.units = self.weights = 0
        self.layouts: dict[Layout, tuple[int, int, int]] = {}
        """For each layout of rows in 8 bits: their address, the address of the counter of finished units, and the
        number of units."""
        self._pool, self._rows, self._x = pool, x.shape[0], x.data_ptr()
        self._referred: list[object] = []
        outputs = sum([each.matrix.outputs for each in targets])
        self._byte_unit = pool.byte_unit(outputs) if self._rows <= FEW_ROWS else LONE_UNIT
        self._make_byte_rows([each.matrix for each in targets])
        pool.row_lists.begin(len(targets) * (1 + 2 * self._rows))
        for target in targets:
            self._add(target)

    def _make_byte_rows(self, matrices: Sequence[Matrix]) -> None:
        """Add tasks that round the activation rows to 8 bits, in every layout that the matrices need."""
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

    def _add(self, target: Target) -> None:
        matrix, out, stride, bias = target
        products, columns, rows = matrix.products, matrix.columns, range(self._rows)
        outputs = range(out, out + stride * self._rows, stride)
        assert products is not None
        if products.in_bytes is not None:
            begin, done, units = self.layouts[products.in_bytes.layout]
            row_bytes = products.in_bytes.layout.nbytes(columns)
            given = self._pool.row_lists.add(range(begin, begin + row_bytes * self._rows, row_bytes), outputs)
            self._task(matrix, products.in_bytes.products, given, 0, bias, self._byte_unit, (done, units))
        elif self._rows == 1 or self._pool.rows_are_alone:
            for n in rows:
                self._task(matrix, products.of_rows[0], self._x + 2 * columns * n, out + stride * n, bias, LONE_UNIT)
        else:
            assert not bias and self._rows <= MOST_QUANTISED_ROWS, self._rows
            for pairs in passes([(self._x + 2 * columns * n, out + stride * n) for n in rows]):
                self._referred.append(pairs)
                self._task(matrix, products.of_rows[pairs.count // 2], pairs.address, 0, 0, LONE_UNIT)
        self.weights += matrix.outputs * columns

    def _task(
        self,
        matrix: Matrix,
        function: int,
        x: int,
        out: int,
        bias: int,
        unit: int,
        wait: tuple[int, int] | None = None,
    ) -> None:
        wait_at, wait_for = wait or (self._pool.at_once, 0)
        self.fields += (self.units, matrix.outputs, unit, tasks.FORMAT, wait_at, wait_for, self._pool.nowhere)
        self.fields += (function, x, matrix.address, out, matrix.columns, bias)
        self.units += -(-matrix.outputs // unit)
