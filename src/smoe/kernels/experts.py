"""One token through its experts in one piece of machine code: products, activation, weighted sum.

    up 0 | up 1 | ... | gate 0 | down 0 | gate 1 | down 1 | ... | sum

Every thread takes the next unit that nobody has taken; a unit that needs what another thread is about to finish waits
for it without leaving machine code. Between the parts of a layer nothing falls asleep, and Python runs once.

Same bits as the library's operations one by one (grade E0): the products are `row_product.py`'s, the rest
`elementwise.py`'s, and both are compared with the library's on the model's own experts at load.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from smoe.kernels import tasks
from smoe.kernels.crew import LONE_UNIT, UNIT, WAKING_WEIGHTS, Crew

MOST_EXPERTS = tasks.MOST_COUNTS
"""Of one token: each has a count of its own."""
_SUM_UNIT = 512


class Expert(NamedTuple):
    """Where one expert's matrices lie, and which row of the outputs is its own."""

    row: int
    up: torch.Tensor
    """[H, 2I], rows in memory along H."""
    down: torch.Tensor
    """[I, H]"""


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
        self._gains = (ctypes.c_float * experts)()

    def forward(
        self,
        x: torch.Tensor,
        experts: Sequence[Expert],
        rows: torch.Tensor,
        total: tuple[Sequence[float], torch.Tensor] | None = None,
    ) -> None:
        """x [1, H] through each expert -> its row of `rows` [n, H].

        With `total` = (gains, out [1, H]) also the sum: out = the rows times their gains, added up in ascending order.
        All tensors are bf16 and lie in one piece.
        """
        if rows.shape[0] > self._wide.shape[0]:
            self._reserve(rows.shape[0])
        crew, hidden, inner = self._crew, self._hidden, self._inner
        size = UNIT if len(experts) > 1 else LONE_UNIT
        ups, downs = -(-2 * inner // size), -(-hidden // size)
        at_once, nowhere, progress = crew.at_once, crew.nowhere, crew.word(tasks.PROGRESS)
        token, table, out = x.data_ptr(), self.table.data_ptr(), rows.data_ptr()
        wide, gated = self._wide.data_ptr(), self._gated.data_ptr()
        fields: list[int] = []
        unit = 0
        for expert in experts:
            count, row = progress + 8 * expert.row, wide + 4 * inner * expert.row
            fields += (unit, 2 * inner, size, tasks.PRODUCT, at_once, 0, count)
            fields += (token, expert.up.data_ptr(), row, 0, hidden, hidden)
            unit += ups
        for expert in experts:
            n = expert.row
            count, row, mid = progress + 8 * n, wide + 4 * inner * n, gated + 2 * inner * n
            fields += (unit, inner, inner, tasks.GATE, count, ups, count, row, table, mid, inner, 0, 0)
            fields += (unit + 1, hidden, size, tasks.PRODUCT, count, ups + 1, nowhere)
            fields += (mid, expert.down.data_ptr(), out + 2 * hidden * n, 0, inner, inner)
            unit += 1 + downs
        if total is not None:
            gains, sum_ = total
            struct.pack_into(f"{len(gains)}f", self._gains, 0, *gains)
            fields += (unit, hidden, _SUM_UNIT, tasks.COMBINE, crew.finished, unit, nowhere)
            fields += (out, ctypes.addressof(self._gains), sum_.data_ptr(), rows.shape[0], hidden, 0)
            unit += -(-hidden // _SUM_UNIT)
        is_long = 3 * inner * hidden * len(experts) >= WAKING_WEIGHTS
        crew.run(fields, unit, is_long, counts=rows.shape[0])
