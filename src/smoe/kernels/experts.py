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
from smoe.kernels.crew import LONE_UNIT, UNIT, WAKING_WEIGHTS, Crew, Pairs
from smoe.kernels.row_product import chain_of

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

    def __init__(self, crew: Crew, hidden: int, inner: int, table: torch.Tensor) -> None:
        self.crew = crew
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
        self._reserve(sum(len(expert.places) for expert in experts))
        work = _Work(self, x, rows, UNIT if len(experts) > 1 else LONE_UNIT)
        for n, expert in enumerate(experts):
            work.ups(n, expert)
        for n, expert in enumerate(experts):
            work.downs(n, expert)
        if sums is not None:
            work.sums(sums)
        is_long = 3 * self.inner * self.hidden * len(experts) >= WAKING_WEIGHTS
        self.crew.run(work.fields, work.units, is_long, counts=len(experts))


class _Work:
    """The tasks of one call, and the memory that they refer to."""

    def __init__(self, shape: TokenExperts, x: torch.Tensor, rows: torch.Tensor, size: int) -> None:
        self.fields: list[int] = []
        self.units = 0
        self._shape = shape
        self._size = size
        self._progress = shape.crew.word(tasks.PROGRESS)
        self._x, self._rows = x.data_ptr(), rows.data_ptr()
        self._wide, self._gated = shape.wide.data_ptr(), shape.gated.data_ptr()
        self._scratch = 0
        self._first: list[int] = []
        """Of every expert, its first row in the scratch."""
        self._kept: list[object] = []

    def ups(self, n: int, expert: Expert) -> None:
        hidden, inner, crew = self._shape.hidden, self._shape.inner, self._shape.crew
        self._first.append(self._scratch)
        wide = self._wide + 4 * inner * self._scratch
        pairs = [(self._x + 2 * hidden * t, wide + 4 * inner * i) for i, (t, _) in enumerate(expert.places)]
        self._product(pairs, expert.up, hidden, 2 * inner, crew.at_once, 0, self._progress + 8 * n)
        self._scratch += len(pairs)

    def downs(self, n: int, expert: Expert) -> None:
        hidden, inner, crew = self._shape.hidden, self._shape.inner, self._shape.crew
        count, first = self._progress + 8 * n, self._first[n]
        wide, gated = self._wide + 4 * inner * first, self._gated + 2 * inner * first
        ups, rows = -(-2 * inner // self._size), len(expert.places)
        for i in range(rows):
            self.fields += (self.units, inner, inner, tasks.GATE, count, ups, count, wide + 4 * inner * i)
            self.fields += (self._shape.table.data_ptr(), gated + 2 * inner * i, inner, 0, 0)
            self.units += 1
        pairs = [(gated + 2 * inner * i, self._rows + 2 * hidden * row) for i, (_, row) in enumerate(expert.places)]
        self._product(pairs, expert.down, inner, hidden, count, ups + rows, crew.nowhere)

    def _product(
        self,
        pairs: Sequence[tuple[int, int]],
        matrix: torch.Tensor,
        columns: int,
        outputs: int,
        wait_at: int,
        wait_for: int,
        count_at: int,
    ) -> None:
        kind = tasks.PRODUCT if len(pairs) == 1 else tasks.ROWS
        self.fields += (self.units, outputs, self._size, kind, wait_at, wait_for, count_at)
        if kind == tasks.PRODUCT:
            ((x, out),) = pairs
            self.fields += (x, matrix.data_ptr(), out, 0, columns, columns)
        else:
            addresses = Pairs(pairs)
            self._kept.append(addresses)
            self.fields += (
                addresses.address,
                matrix.data_ptr(),
                0,
                addresses.count,
                columns,
                chain_of(columns, len(pairs)),
            )
        self.units += -(-outputs // self._size)

    def sums(self, sums: Sums) -> None:
        hidden, before = self._shape.hidden, self.units
        gains = (ctypes.c_float * len(sums.gains))(*sums.gains)
        self._kept.append(gains)
        at, out = ctypes.addressof(gains), sums.out.data_ptr()
        for token, (first, count) in enumerate(sums.spans):
            if count:
                crew = self._shape.crew
                self.fields += (self.units, hidden, _SUM_UNIT, tasks.COMBINE, crew.finished, before, crew.nowhere)
                self.fields += (self._rows + 2 * hidden * first, at + 4 * first, out + 2 * hidden * token)
                self.fields += (count, hidden, 0)
                self.units += -(-hidden // _SUM_UNIT)
