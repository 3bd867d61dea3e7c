"""Tokens through their experts in one piece of machine code: products, activation, weighted sum.

    up 0 | up 1 | ... | gate 0 | down 0 | gate 1 | down 1 | ... | sum

Every thread takes the next unit that nobody has taken; a unit that needs what another thread is about to finish waits
for it without leaving machine code. Between the parts of a layer nothing falls asleep, and Python runs once.

Same bits as the library's operations one by one (grade E0): the products are `row_product.py`'s, the rest
`elementwise.py`'s, and both are compared with the library's on the model's own experts at load.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from smoe.kernels import tasks
from smoe.kernels.row_product import chain_of
from smoe.kernels.spinning_pool import LONE_UNIT, UNIT, WAKING_WEIGHTS, Pairs, SpinningPool

MOST_EXPERTS = tasks.MOST_COUNTS
"""At once: each has a count of its own."""
MOST_ROWS = 4
"""Tokens of one expert: for more the library, which has them all in its registers at once, is faster."""
MOST_TOKENS = tasks.MOST_TASKS - MOST_EXPERTS * (MOST_ROWS + 2)
"""At once: each has a sum, an expert has two products and a gate for every row."""
_SUM_UNIT = 512


class Expert(NamedTuple):
    """Where one expert's matrices lie, and whose it is."""

    up: torch.Tensor
    """[H, 2I], rows in memory along H."""
    down: torch.Tensor
    """[I, H]"""
    places: Sequence[tuple[int, int]]
    """(token, row of the outputs) of each that has chosen it, in the library's order."""


class Sums(NamedTuple):
    """What is added up once all experts are done."""

    gains: Sequence[float]
    """Of every row of the outputs."""
    spans: Sequence[tuple[int, int]]
    """Of every token, its first row and how many it has; one without any keeps what `out` holds."""
    out: torch.Tensor
    """[T, H]"""


class TokenExperts:
    """The experts of one shape: `hidden` H, `inner` I, activation by `table` (bf16 [65536])."""

    def __init__(self, pool: SpinningPool, hidden: int, inner: int, table: torch.Tensor) -> None:
        self.pool = pool
        self.hidden = hidden
        self.inner = inner
        self.table = table
        self.most_rows = 1
        """Tokens of one expert that it may take: more where the library's bits of several rows are its own."""
        self.wide = torch.empty(0, 2 * inner, dtype=torch.bfloat16)
        self.gated = torch.empty(0, inner, dtype=torch.bfloat16)
        self._reserve(8)

    def _reserve(self, rows: int) -> None:
        if rows > self.wide.shape[0]:
            self.wide = torch.empty(rows, 2 * self.inner, dtype=torch.bfloat16)
            self.gated = torch.empty(rows, self.inner, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, experts: Sequence[Expert], rows: torch.Tensor, sums: Sums | None = None) -> None:
        """x [T, H], each expert's tokens -> their rows of `rows` [n, H]; at most `MOST_EXPERTS` of them.

        With `sums` also `out`: each token's rows times their gains, added up in ascending order. All tensors are bf16
        and lie in one piece.
        """
        self._reserve(sum([len(expert.places) for expert in experts]))
        work = _Work(self, x, rows, experts)
        work.ups()
        work.downs()
        if sums is not None:
            work.sums(sums)
        is_long = 3 * self.inner * self.hidden * len(experts) >= WAKING_WEIGHTS
        self.pool.run(work.fields, work.units, is_long, counts=len(experts))


class _Work:
    """The tasks of one call, and the memory that they refer to.

    An expert's first product, its gates and its second one count what they have done at a word of its own.
    """

    def __init__(self, shape: TokenExperts, x: torch.Tensor, rows: torch.Tensor, experts: Sequence[Expert]) -> None:
        self.fields: list[int] = []
        self.units = 0
        self._shape = shape
        self._experts = experts
        self._size = UNIT if len(experts) > 1 else LONE_UNIT
        self._ups = -(-2 * shape.inner // self._size)
        """Units of a first product."""
        self._counts = shape.pool.word(tasks.PROGRESS)
        self._x, self._rows = x.data_ptr(), rows.data_ptr()
        self._kept: list[object] = []

    def ups(self) -> None:
        """The first products, into the scratch: row after row, expert after expert."""
        shape, fields, size, x = self._shape, self.fields, self._size, self._x
        hidden, inner, at_once = shape.hidden, shape.inner, shape.pool.at_once
        unit, wide, count = 0, shape.wide.data_ptr(), self._counts
        for up, _, places in self._experts:
            if len(places) == 1:
                fields += (unit, 2 * inner, size, tasks.PRODUCT, at_once, 0, count, x + 2 * hidden * places[0][0])
                fields += (up.data_ptr(), wide, 0, hidden, hidden)
            else:
                pairs = [(x + 2 * hidden * token, wide + 4 * inner * i) for i, (token, _) in enumerate(places)]
                fields += (unit, 2 * inner, size, tasks.ROWS, at_once, 0, count, *self._several(pairs, up))
            unit += self._ups
            wide += 4 * inner * len(places)
            count += 8
        self.units = unit

    def downs(self) -> None:
        """Gates and second products."""
        shape, fields, size, out = self._shape, self.fields, self._size, self._rows
        hidden, inner, ups, nowhere = shape.hidden, shape.inner, self._ups, shape.pool.nowhere
        table, downs = shape.table.data_ptr(), -(-hidden // size)
        unit, wide, gated, count = self.units, shape.wide.data_ptr(), shape.gated.data_ptr(), self._counts
        for _, down, places in self._experts:
            first = gated
            for _ in places:
                fields += (unit, inner, inner, tasks.GATE, count, ups, count, wide, table, gated, inner, 0, 0)
                unit += 1
                wide += 4 * inner
                gated += 2 * inner
            need = ups + len(places)
            if len(places) == 1:
                fields += (unit, hidden, size, tasks.PRODUCT, count, need, nowhere, first, down.data_ptr())
                fields += (out + 2 * hidden * places[0][1], 0, inner, inner)
            else:
                pairs = [(first + 2 * inner * i, out + 2 * hidden * row) for i, (_, row) in enumerate(places)]
                fields += (unit, hidden, size, tasks.ROWS, count, need, nowhere, *self._several(pairs, down))
            unit += downs
            count += 8
        self.units = unit

    def _several(self, pairs: Sequence[tuple[int, int]], matrix: torch.Tensor) -> tuple[int, ...]:
        """The arguments of a product of several rows."""
        addresses, columns = Pairs(pairs), matrix.shape[0]
        self._kept.append(addresses)
        return addresses.address, matrix.data_ptr(), 0, addresses.count, columns, chain_of(columns, len(pairs))

    def sums(self, sums: Sums) -> None:
        """Every token's rows, once all products are there."""
        pool, hidden, out, before = self._shape.pool, self._shape.hidden, self._rows, self.units
        gains = (ctypes.c_float * len(sums.gains))(*sums.gains)
        self._kept.append(gains)
        for token, (first, count) in enumerate(sums.spans):
            if count:
                self.fields += (self.units, hidden, _SUM_UNIT, tasks.COMBINE, pool.finished, before, pool.nowhere)
                self.fields += (out + 2 * hidden * first, ctypes.addressof(gains) + 4 * first)
                self.fields += (sums.out.data_ptr() + 2 * hidden * token, count, hidden, 0)
                self.units += -(-hidden // _SUM_UNIT)
