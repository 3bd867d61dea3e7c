"""The arithmetic of bf16 experts without torch, by our kernels alone, on weights in a slot.

One call of a kernel (`kernels/experts.py`) computes, for n rows:

    x [n, H] --up--> [n, 2I] --table[gate] * up--> [n, I] --down--> [n, H]

Other forms of experts (biases, other activations, other dtypes) are not supported. The coordinator, which has torch,
decides whether the bits are torch's. It has tested the number of rows (`kernel_rows.py`) and lets the worker first
compute experts whose results it knows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from smoe.kernels.expert_work import Expert
from smoe.kernels.experts import Bits, TokenExperts
from smoe.kernels.matrix import Matrix
from smoe.kernels.row_product import fits_shape
from smoe.kernels.spinning_pool import SpinningPool
from smoe.memory.arena import Arena

UP, DOWN = "gate_up_proj", "down_proj"
"""The names of the parts of such an expert."""
_ROWS_AT_ONCE = 512


class KernelMath:
    """The arithmetic of experts of one shape, computed by our kernels alone. Layers of the same shape share the
    object."""

    def __init__(self, hidden: int, inner: int, table: Bits, pool: SpinningPool | None = None) -> None:
        """`hidden`: H; `inner`: I; `table`: the activation's value for every bf16 number [65536]. `pool`: the threads
        that compute; None: the object cannot compute yet."""
        self.hidden, self.inner = hidden, inner
        self._table = table
        self._kernel = None if pool is None else TokenExperts(pool, hidden, inner, table)

    @property
    def kind(self) -> tuple[object, ...]:
        return self.hidden, self.inner

    def bind(self, arena: Arena, slot: int, offsets: Mapping[str, int]) -> tuple[Matrix, Matrix]:
        begin = arena.address(slot)
        up = Matrix(begin + offsets[UP], 2 * self.inner, self.hidden)
        return up, Matrix(begin + offsets[DOWN], self.hidden, self.inner)

    def agrees(self, pool: SpinningPool, weights: tuple[Matrix, Matrix]) -> bool:
        """Return whether the kernel supports the shapes of these weights. The bits are not compared, because this
        process has no torch."""
        del pool
        return all(fits_shape(each.columns, each.outputs) for each in weights)

    def by_pool(self, pool: SpinningPool | None) -> KernelMath:
        """Return this arithmetic, computed by the threads of `pool`."""
        return KernelMath(self.hidden, self.inner, self._table, pool)

    def forward(self, x: Bits, weights: tuple[Matrix, Matrix]) -> Bits:
        """Return the expert's output [n, H] for rows x [n, H]. Many rows are computed in chunks of nearly equal size,
        because a chunk of one row would have another order of sums."""
        assert self._kernel is not None, "nothing multiplies"
        x, out = np.ascontiguousarray(x), np.empty_like(x)
        pool, rows = self._kernel.pool, len(x)
        if pool.own_order is not None and rows > pool.most_own_rows:
            raise ValueError(
                f"{rows} rows were given to one expert; without torch an expert takes at most {pool.most_own_rows} "
                "rows at once"
            )
        parts = -(-rows // _ROWS_AT_ONCE)
        for n in range(parts):
            begin, end = n * rows // parts, (n + 1) * rows // parts
            places = [(row, row) for row in range(end - begin)]
            self._kernel.forward(x[begin:end], [Expert(weights, places)], out[begin:end])
        return out
