"""Computes a prompt's tokens through the experts of a layer, some experts at a time.

    tokens                 quantized experts: rounded to 8 bits once for all experts
    expert after expert    first product, gate, second product          rows of one job: [n, H] in bf16
                           total [T, H] += gain * row                   in float32, in ascending order of experts

Rows of bf16 experts are packed for each product if there are many (`many_rows.py`).

Apart from the totals, only the rows of one job are in memory. The sum of a token's experts is rounded once (grade E1)
and depends only on the order of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from smoe.bounds import INT8
from smoe.kernels.byte_experts import ByteExperts, RoutedRows, RowMemory, addresses_of, form_of_all, rounded_rows
from smoe.kernels.byte_layout import Layout
from smoe.kernels.expert_work import Expert, ExpertWork, byte_functions, has_bf16, packed_rows_bytes
from smoe.kernels.experts import MOST_EXPERTS, TokenExperts
from smoe.kernels.many_rows import LINE, MOST_MANY_ROWS, aligned
from smoe.kernels.matrix import Matrix, added_rows

MOST_ROWS_OF_WORK = 512
"""The largest number of rows in a job (2 MB if H is 2048), unless a single expert has more."""
MOST_PACKED_ROWS_OF_WORK = MOST_MANY_ROWS // 2
"""The same for experts whose rows are packed. Rows that fill up registers at most double their number, so that packed
rows take the memory of at most `MOST_MANY_ROWS` rows."""


class Chosen(NamedTuple):
    """An expert that n tokens of a prompt have chosen: its matrices, the indices of the tokens [n], and their routing
    weights [n]."""

    matrices: Sequence[Matrix]
    tokens: npt.NDArray[np.int64]
    gains: npt.NDArray[np.float32]
    outputs: torch.Tensor | None = None
    """The expert's outputs for its tokens, [n, H] in bf16, if another compute unit has computed them. Then `matrices`
    is empty."""

    def part(self, begin: int, end: int) -> Chosen:
        """Return the same expert for some of its tokens."""
        outputs = None if self.outputs is None else self.outputs[begin:end]
        return Chosen(self.matrices, self.tokens[begin:end], self.gains[begin:end], outputs)


def has_byte_products(matrices: Sequence[Matrix]) -> bool:
    """Return whether all these matrices are multiplied with activation rows in 8 bits."""
    return len(byte_functions(matrices)) == len(matrices)


class PromptExperts:
    """The weighted sums of experts' outputs for the tokens x [T, H] in bf16."""

    def __init__(self, kernel: TokenExperts, x: torch.Tensor) -> None:
        self._kernel = kernel
        self._x = x.contiguous()
        self.total = torch.zeros(x.shape, dtype=torch.float32)
        """The weighted sums of the outputs of all experts computed until now, float32 [T, H]."""
        self._byte_rows: dict[Layout, torch.Tensor] = {}
        self._waiting: list[Chosen] = []
        self._rows = 0
        self._packed: torch.Tensor | None = None
        """Memory for packed rows of one job."""
        has_packed = kernel.pool.many is not None and not kernel.pool.rows_are_alone
        self._many = kernel.pool.many if has_packed else None
        self._most_rows = MOST_ROWS_OF_WORK

    def has_room(self, tokens: int) -> bool:
        """Return whether an expert with `tokens` tokens can be added before the next `flush`."""
        is_small = self._rows + tokens <= self._most_rows and len(self._waiting) < MOST_EXPERTS
        return is_small or not self._waiting

    def add(self, expert: Chosen) -> None:
        """Add an expert, which the next `flush` computes. `has_room` must have returned True."""
        self._waiting.append(expert)
        self._rows += len(expert.tokens)
        if self._many is not None and has_bf16(expert.matrices):
            self._most_rows = MOST_PACKED_ROWS_OF_WORK

    def flush(self) -> int:
        """Compute all experts added since the last call, add their weighted outputs to `total`, and return the number
        of these experts."""
        waiting = self._waiting
        self._waiting, self._rows = [], 0
        if len(waiting) == 1:  # an expert that most tokens have chosen
            (expert,) = waiting
            for n in range(0, len(expert.tokens), MOST_MANY_ROWS):
                self._compute([expert.part(n, n + MOST_MANY_ROWS)])
        elif waiting:
            self._compute(waiting)
        return len(waiting)

    def _compute(self, chosen: Sequence[Chosen]) -> None:
        counts = np.array([len(each.tokens) for each in chosen])
        tokens = np.concatenate([each.tokens for each in chosen])
        gains = np.concatenate([each.gains for each in chosen])
        rows = self._x.new_empty(len(tokens), self._x.shape[1])
        experts = [each.matrices for each in chosen]
        form = form_of_all(experts)
        self._make_byte_rows(experts)
        if form is None:
            self._compute_each(chosen, rows, gains)
            return
        memory = RowMemory(self._byte_addresses, rows.data_ptr(), self.total.data_ptr())
        routed = RoutedRows(counts, tokens, gains)
        ByteExperts(self._kernel, form, addresses_of(experts), routed, memory).run()

    def _compute_each(self, chosen: Sequence[Chosen], rows: torch.Tensor, gains: npt.NDArray[np.float32]) -> None:
        """Compute experts of any formats, some of which other compute units have computed. `rows` [n, H] receives their
        outputs; `gains`: the routing weights of all rows."""
        experts, totals, first = list[Expert](), list[int](), 0
        total, width = self.total.data_ptr(), 4 * self._x.shape[1]
        for matrices, tokens, _, outputs in chosen:
            given = tokens.tolist()
            if outputs is None:
                experts.append(Expert(matrices, [(token, first + n) for n, token in enumerate(given)]))
            else:
                rows[first : first + len(given)] = outputs
            totals += [total + width * token for token in given]
            first += len(given)
        kernel = self._kernel
        kernel.reserve(len(rows))
        work = ExpertWork(kernel, self._x.data_ptr(), rows.data_ptr(), experts)
        work.take_byte_rows(self._byte_addresses, len(rows))
        if self._many is not None:
            nbytes = sum(packed_rows_bytes(kernel, each) for each in experts)
            work.pack_rows(aligned(self._memory(nbytes).data_ptr()))
        work.ups()
        work.downs()
        work.add_rows(added_rows(INT8), gains.ctypes.data, totals)
        kernel.run(work, len(experts))

    @property
    def _byte_addresses(self) -> dict[Layout, int]:
        """The addresses of the tokens in 8 bits, by layout."""
        return {layout: rows.data_ptr() for layout, rows in self._byte_rows.items()}

    def _memory(self, nbytes: int) -> torch.Tensor:
        """Return memory for `nbytes` bytes of packed rows. The next job overwrites it."""
        assert self._many is not None
        if self._packed is None or len(self._packed) < nbytes + LINE:
            self._packed = torch.empty(nbytes + LINE, dtype=torch.uint8)
        return self._packed

    def _make_byte_rows(self, experts: Sequence[Sequence[Matrix]]) -> None:
        """Round the tokens to 8 bits, in every layout that the matrices of `experts` need and for which no rounded
        tokens exist yet."""
        for functions in {each for matrices in experts for each in byte_functions(matrices[:-1])}:
            if functions.layout not in self._byte_rows:
                self._byte_rows[functions.layout] = rounded_rows(self._kernel.pool, self._x, functions)
