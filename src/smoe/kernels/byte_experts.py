"""The tasks of a job for many tokens through experts whose activation rows are all in 8 bits.

`ExpertWork` makes the same tasks for experts of any format, one by one in Python. Here machine code makes them
(`byte_experts_code.py`), so that the threads get the next job of a prompt soon (docs/log/kernels.md).

The numbers of the tokens' rows follow each other, expert by expert. Every matrix of an expert has one list of rows
(`RowLists`), and all lists of one matrix follow each other, too:

    lists of gate      3, row, product, row, product, row, product | 1, row, product | 2, ...
    lists of up        ...
    lists of down      ...
    list of all rows   for the sums
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from smoe.bounds import INT8
from smoe.kernels import tasks
from smoe.kernels.byte_layout import Layout
from smoe.kernels.expert_work import SUM_UNIT
from smoe.kernels.isa import widest
from smoe.kernels.jit import Source, compile_functions
from smoe.kernels.matrix import ByteFunctions, Matrix, added_rows
from smoe.kernels.quantised_work import FEW_ROWS, LONE_UNIT, ROWS_OF_UNIT
from smoe.kernels.spinning_pool import UNIT, SpinningPool
from smoe.kernels.tasks import PoolJob

if TYPE_CHECKING:
    from smoe.kernels.experts import TokenExperts

Words = npt.NDArray[np.int64]


class ByteMatrix(NamedTuple):
    """A matrix without its address: its functions and its shape."""

    functions: ByteFunctions
    outputs: int
    columns: int


ByteForm = Sequence[ByteMatrix]
"""The matrices of an expert. The last one is multiplied after the gate."""


class RoutedRows(NamedTuple):
    """The tokens of some experts, expert after expert. Each has a row, n in all. The arrays are contiguous."""

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


def form_of_all(experts: Sequence[Sequence[Matrix]]) -> ByteForm | None:
    """Return the form that all these experts have. Return None if experts differ in their formats, or if a matrix is
    not multiplied with rows in 8 bits."""
    products = [matrix.products for matrix in experts[0]]
    form = [
        ByteMatrix(matrix.products.in_bytes, matrix.outputs, matrix.columns)
        for matrix in experts[0]
        if matrix.products is not None and matrix.products.in_bytes is not None
    ]
    if not form or len(form) < len(products):
        return None
    alike = all([matrix.products for matrix in matrices] == products for matrices in experts)
    return form if alike else None


def addresses_of(experts: Sequence[Sequence[Matrix]]) -> Words:
    """Return the addresses of the experts' matrices, [experts, matrices]."""
    each = len(experts[0])
    addresses = (matrix.address for matrix in chain.from_iterable(experts))
    return np.fromiter(addresses, np.int64, len(experts) * each).reshape(-1, each)


def rounded_rows(pool: SpinningPool, x: torch.Tensor, functions: ByteFunctions) -> torch.Tensor:
    """Return the rows of x [T, H], contiguous and in bf16, in 8 bits, in the layout of `functions`."""
    tokens, hidden = x.shape
    made = torch.empty(tokens, functions.layout.nbytes(hidden), dtype=torch.uint8)
    fields = [0, tokens, ROWS_OF_UNIT, tasks.FORMAT, pool.at_once, 0, pool.nowhere, functions.rows]
    fields += [x.data_ptr(), 0, made.data_ptr(), hidden, 0]
    pool.run(fields, -(-tokens // ROWS_OF_UNIT), is_long=tokens > ROWS_OF_UNIT)
    return made


def reserve(shape: TokenExperts, form: ByteForm, rows: int) -> tuple[int, int]:
    """Allocate the memory for `rows` rows between the products of one job. Jobs with fewer rows use the same memory.
    Return the address of the rows after the gate, and the bytes of a row."""
    shape.reserve(rows)
    nbytes = form[-1].functions.layout.nbytes(shape.inner)
    return shape.pool.byte_rows(rows * nbytes), nbytes


def run_jobs(pool: SpinningPool, jobs: Sequence[ByteExperts]) -> None:
    """Compute jobs one after the other on the threads of a pool. Their memory must have been reserved together."""
    pool.run_all([each.job for each in jobs], any(each.is_long for each in jobs))


class ByteExperts:
    """The tasks of one job: products, gates and weighted sums of some experts, and the memory to which they refer."""

    def __init__(
        self, shape: TokenExperts, form: ByteForm, addresses: Words, routed: RoutedRows, memory: RowMemory
    ) -> None:
        """`form`: the form of every expert. `addresses`: those of their matrices, [experts, matrices], contiguous."""
        self._shape, self._routed, self._addresses = shape, routed, addresses
        self._count, rows, matrices = len(routed.counts), len(routed.tokens), len(form)
        count, pool, gated_as = self._count, shape.pool, form[-1].functions
        gated, gated_bytes = reserve(shape, form, rows)
        few = routed.counts.max() <= FEW_ROWS
        size = pool.byte_unit(count * (2 * shape.inner + shape.hidden)) if few else UNIT if count > 1 else LONE_UNIT
        self.fields = np.empty((count * (matrices + 1) + 1, tasks.FIELDS), np.int64)
        """The tasks, [tasks, FIELDS]."""
        self._lists, self._sums = np.empty((matrices, count + 2 * rows), np.int64), np.empty(1 + 2 * rows, np.int64)
        words = _words(_of_matrices(shape, form, memory, (gated, gated_bytes), size))
        up_units = sum([-(-each.outputs // size) for each in form[:-1]])
        arguments = _words([
            count, matrices - 1, rows, routed.counts.ctypes.data, routed.tokens.ctypes.data, addresses.ctypes.data,
            ctypes.addressof(words), self._lists.ctypes.data, self._sums.ctypes.data, self.fields.ctypes.data, size,
            up_units, ROWS_OF_UNIT, pool.word(tasks.PROGRESS), pool.at_once, pool.finished, pool.nowhere,
            shape.wide_at, 4 * shape.inner, shape.table_at, shape.inner, gated, gated_bytes, gated_as.gated_rows,
            memory.outputs, memory.totals, shape.hidden, routed.gains.ctypes.data, added_rows(INT8), SUM_UNIT, 0,
        ])  # fmt: skip
        _function()(ctypes.addressof(arguments))
        self.units = arguments[-1]
        """The number of units of all tasks."""

    def run(self) -> None:
        """Compute the tasks on the threads of the pool."""
        run_jobs(self._shape.pool, [self])

    @property
    def job(self) -> PoolJob:
        """The tasks as an argument of the pool."""
        return PoolJob(self.fields.ctypes.data, self.fields.size, self.units, self._count)

    @property
    def is_long(self) -> bool:
        """Whether sleeping threads are woken for the job."""
        return self._shape.is_long(self._count)


def _words(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _of_matrices(
    shape: TokenExperts, form: ByteForm, memory: RowMemory, gated: tuple[int, int], size: int
) -> list[int]:
    """Return what the machine code needs of every matrix (`byte_experts_code.MATRIX_WORDS`). `gated`: the address of
    the rows after the gate, and the bytes of a row. `size`: the outputs of a unit."""
    words, to = list[int](), shape.wide_at
    for n, (functions, outputs, columns) in enumerate(form):
        if n < len(form) - 1:
            layout = functions.layout
            words += (memory.byte_rows[layout], layout.nbytes(shape.hidden), to, 4 * shape.inner)
        else:
            words += (*gated, memory.outputs, 2 * shape.hidden)
        words += (functions.products, outputs, columns, -(-outputs // size))
        to += 2 * outputs
    return words


@functools.cache
def _function() -> Callable[[int], None]:
    """Return the machine code that makes tasks, compiled once per process."""
    isa = widest()
    assert isa is not None, "there is a pool"
    from smoe.kernels import byte_experts_code  # requires llvmlite, which is optional

    signature = (ctypes.c_void_p,)
    (function,) = compile_functions(Source(byte_experts_code.module_of, (isa,)), {byte_experts_code.NAME: signature})
    return function
