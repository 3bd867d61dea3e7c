"""Tokens through their experts, a row each, in one piece of machine code: products, activation, weighted sum.

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
from smoe.kernels.crew import LONE_UNIT, UNIT, WAKING_WEIGHTS, Crew

MOST_EXPERTS = tasks.MOST_COUNTS
"""At once: each has a count of its own."""
_SUM_UNIT = 512


class Expert(NamedTuple):
    """Where one expert's matrices lie, and which row of the outputs is its own."""

    row: int
    up: torch.Tensor
    """[H, 2I], rows in memory along H."""
    down: torch.Tensor
    """[I, H]"""
    token: int = 0
    """Whose hidden state it gets."""


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
        self._crew = crew
        self._hidden = hidden
        self._inner = inner
        self.table = table
        self._reserve(8)

    def _reserve(self, experts: int) -> None:
        self._wide = torch.empty(experts, 2 * self._inner, dtype=torch.bfloat16)
        self._gated = torch.empty(experts, self._inner, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, experts: Sequence[Expert], rows: torch.Tensor, sums: Sums | None = None) -> None:
        """x [T, H], each expert's token -> its row of `rows` [n, H]; at most `MOST_EXPERTS` of them.

        With `sums` also `out`: each token's rows times their gains, added up in ascending order. All tensors are bf16
        and lie in one piece.
        """
        if len(experts) > self._wide.shape[0]:
            self._reserve(len(experts))
        crew, hidden, inner = self._crew, self._hidden, self._inner
        size = UNIT if len(experts) > 1 else LONE_UNIT
        ups, downs = -(-2 * inner // size), -(-hidden // size)
        at_once, nowhere, progress = crew.at_once, crew.nowhere, crew.word(tasks.PROGRESS)
        tokens, table, out = x.data_ptr(), self.table.data_ptr(), rows.data_ptr()
        wide, gated = self._wide.data_ptr(), self._gated.data_ptr()
        fields: list[int] = []
        unit = 0
        for n, expert in enumerate(experts):
            fields += (unit, 2 * inner, size, tasks.PRODUCT, at_once, 0, progress + 8 * n)
            fields += (
                tokens + 2 * hidden * expert.token,
                expert.up.data_ptr(),
                wide + 4 * inner * n,
                0,
                hidden,
                hidden,
            )
            unit += ups
        for n, expert in enumerate(experts):
            count, row, mid = progress + 8 * n, wide + 4 * inner * n, gated + 2 * inner * n
            fields += (unit, inner, inner, tasks.GATE, count, ups, count, row, table, mid, inner, 0, 0)
            fields += (unit + 1, hidden, size, tasks.PRODUCT, count, ups + 1, nowhere)
            fields += (mid, expert.down.data_ptr(), out + 2 * hidden * expert.row, 0, inner, inner)
            unit += 1 + downs
        gains = (ctypes.c_float * len(sums.gains))(*sums.gains) if sums is not None else None
        if sums is not None and gains is not None:
            before = unit
            for token, (first, count) in enumerate(sums.spans):
                if count:
                    fields += (unit, hidden, _SUM_UNIT, tasks.COMBINE, crew.finished, before, nowhere)
                    fields += (out + 2 * hidden * first, ctypes.addressof(gains) + 4 * first)
                    fields += (sums.out.data_ptr() + 2 * hidden * token, count, hidden, 0)
                    unit += -(-hidden // _SUM_UNIT)
        is_long = 3 * inner * hidden * len(experts) >= WAKING_WEIGHTS
        crew.run(fields, unit, is_long, counts=len(experts))
