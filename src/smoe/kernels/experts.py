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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from smoe.kernels import tasks
from smoe.kernels.expert_work import Expert, ExpertWork, packed_rows_bytes
from smoe.kernels.many_rows import LINE, aligned
from smoe.kernels.matrix import Matrix
from smoe.kernels.quantised_work import MOST_QUANTISED_ROWS
from smoe.kernels.rows import MOST_ROWS
from smoe.kernels.spinning_pool import WAKING_WEIGHTS, RowLists, SpinningPool

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
        memory = np.empty(self._packed_bytes(experts), np.uint8)
        if len(memory):
            work.pack_rows(aligned(memory.ctypes.data))
        work.ups()
        work.downs()
        if sums is not None:
            gains = (ctypes.c_float * len(sums.gains))(*sums.gains)
            work.sums(sums.spans, ctypes.addressof(gains), sums.out.data_ptr())
        self.run(work, len(experts))

    def _packed_bytes(self, experts: Sequence[Expert]) -> int:
        """Return the bytes of memory for packed rows; 0 if no rows are packed."""
        nbytes = sum([packed_rows_bytes(self, expert) for expert in experts])
        return nbytes + LINE if nbytes and not self.pool.rows_are_alone else 0

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
        self.pool.run(work.fields, work.units, self.is_long(experts), counts=experts + len(work.layouts))

    def is_long(self, experts: int) -> bool:
        """Return whether products of this number of experts take so long that sleeping threads are woken for them."""
        return 3 * self.inner * self.hidden * experts >= WAKING_WEIGHTS


def _address(numbers: torch.Tensor | Bits) -> int:
    at: Any = numbers.ctypes.data if isinstance(numbers, np.ndarray) else numbers.data_ptr()
    return int(at)


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
        self._is_long = shape.is_long(count)
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
