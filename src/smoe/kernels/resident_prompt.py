"""Computes a prompt's tokens through the experts of a layer, all of which are in memory, from the router's choice.

    chosen [T, K] -> routes sorted by expert -> jobs of some experts each -> total [T, H]

The results are those of `PromptExperts`, bit by bit, which gets its experts one by one, as they arrive. Here nothing
must be waited for, so the experts' matrices are found in a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from smoe.kernels.byte_experts import (
    ByteExperts,
    ByteForm,
    RoutedRows,
    RowMemory,
    Words,
    addresses_of,
    form_of_all,
    reserve,
    rounded_rows,
    run_jobs,
)
from smoe.kernels.experts import MOST_EXPERTS, TokenExperts
from smoe.kernels.matrix import Matrix
from smoe.kernels.prompt_experts import MOST_ROWS_OF_WORK


class ResidentPrompt:
    """The experts of one layer, all of the same form and in memory."""

    def __init__(self, kernel: TokenExperts, form: ByteForm, addresses: Words) -> None:
        """`addresses`: those of the experts' matrices, [E, matrices]."""
        self._kernel, self._form, self._addresses = kernel, form, addresses
        self._layouts = {each.functions.layout: each.functions for each in form[:-1]}

    @classmethod
    def of(cls, kernel: TokenExperts, experts: Sequence[Sequence[Matrix]]) -> ResidentPrompt | None:
        """Return the experts with these matrices. Return None if they differ in their formats, or are not multiplied
        with rows in 8 bits."""
        form = form_of_all(experts)
        return None if form is None else cls(kernel, form, addresses_of(experts))

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the weighted sums of the outputs of each token's experts, float32 [T, H], and the number of experts
        that were computed. x [T, H] in bf16 is contiguous; the experts `chosen` and their `weights` are [T, K]."""
        total = torch.zeros(x.shape, dtype=torch.float32)
        outputs = x.new_empty(min(MOST_ROWS_OF_WORK, chosen.numel()), x.shape[1])
        rounded = {layout: rounded_rows(self._kernel.pool, x, each) for layout, each in self._layouts.items()}
        byte_rows = {layout: rows.data_ptr() for layout, rows in rounded.items()}
        memory = RowMemory(byte_rows, outputs.data_ptr(), total.data_ptr())
        experts, routed = _by_expert(chosen, weights, len(self._addresses))
        addresses = self._addresses[experts]
        reserve(self._kernel, self._form, len(outputs))
        jobs = list[ByteExperts]()
        for some, rows in _jobs(routed.counts.tolist()):
            counts = routed.counts[some] if some.stop - some.start > 1 else np.array([rows.stop - rows.start])
            part = RoutedRows(counts, routed.tokens[rows], routed.gains[rows])
            assert counts.sum() == len(part.tokens), "the rows of a job are those of its experts"
            jobs.append(ByteExperts(self._kernel, self._form, addresses[some], part, memory))
        run_jobs(self._kernel.pool, jobs)
        return total, len(experts)


def _by_expert(chosen: torch.Tensor, weights: torch.Tensor, experts: int) -> tuple[Words, RoutedRows]:
    """Return the distinct chosen experts in ascending order, and their rows, in ascending order of tokens."""
    routes = chosen.numpy().reshape(-1)
    order = routes.astype(np.int16).argsort(kind="stable")  # numpy sorts such numbers by their digits
    counts = np.bincount(routes, minlength=experts)
    present = counts.nonzero()[0]
    gains = weights.detach().float().reshape(-1).numpy()[order]
    return present, RoutedRows(counts[present], order // chosen.shape[1], gains)


def _jobs(counts: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield the experts and the rows of each job. An expert with more rows than a job may have gets jobs of its own."""
    first = begin = end = 0
    for n, count in enumerate(counts):
        if n > first and (end - begin + count > MOST_ROWS_OF_WORK or n - first == MOST_EXPERTS):
            yield slice(first, n), slice(begin, end)
            first, begin = n, end
        end += count
        if count > MOST_ROWS_OF_WORK:
            for row in range(begin, end, MOST_ROWS_OF_WORK):
                yield slice(n, n + 1), slice(row, min(row + MOST_ROWS_OF_WORK, end))
            first, begin = n + 1, end
    if end > begin:
        yield slice(first, len(counts)), slice(begin, end)
