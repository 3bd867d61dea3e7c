"""A prompt through experts that are all in memory, compared with `PromptExperts`, which gets them one by one.

Would catch: rows of another expert or token, weights in another order, an expert without rows that shifts the others,
rows left out where a job ends, memory of the first job that a larger one replaces, experts of several formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from smoe.bounds import BF16, INT8
from smoe.formats.registry import FORMATS
from smoe.kernels import resident_prompt
from smoe.kernels.byte_experts import ByteExperts
from smoe.kernels.experts import MOST_EXPERTS, TokenExperts
from smoe.kernels.isa import widest
from smoe.kernels.matrix import Matrix, products_of
from smoe.kernels.prompt_experts import MOST_ROWS_OF_WORK, Chosen, PromptExperts
from smoe.kernels.resident_prompt import ResidentPrompt
from smoe.kernels.spinning_pool import SpinningPool
from tests.formats.blocks import random_rows

pytestmark = pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
HIDDEN, INNER, TOP = 256, 256, 4


@pytest.fixture
def kernel() -> Iterator[TokenExperts]:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    with SpinningPool(2, in_own_order=True) as pool:
        yield TokenExperts(pool, HIDDEN, INNER, torch.nn.functional.silu(bits))


class Experts:
    """Experts whose matrices stay in memory. There are a few distinct ones, at many addresses."""

    def __init__(self, count: int, activations: str = INT8) -> None:
        self._kept = [
            [random_rows(FORMATS[form], rows, columns, seed=n) for rows, columns, form in self._shapes]
            for n in range(count)
        ]
        self.matrices = [
            [
                Matrix(data.ctypes.data, rows, columns, products_of(FORMATS[form], activations))
                for data, (rows, columns, form) in zip(each, self._shapes, strict=True)
            ]
            for each in self._kept
        ]

    @property
    def _shapes(self) -> Sequence[tuple[int, int, str]]:
        return (INNER, HIDDEN, "Q4_K"), (INNER, HIDDEN, "Q4_K"), (HIDDEN, INNER, "Q6_K")


def one_by_one(
    kernel: TokenExperts, experts: Experts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    prompt = PromptExperts(kernel, x)
    for n, matrices in enumerate(experts.matrices):
        tokens, places = torch.where(chosen == n)
        if len(tokens):
            if not prompt.has_room(len(tokens)):
                prompt.flush()
            prompt.add(Chosen(matrices, tokens.numpy(), weights[tokens, places].float().numpy()))
    prompt.flush()
    return prompt.total


@pytest.mark.parametrize(
    ("tokens", "count", "favourites"),
    [(2, 8, 8), (40, 8, 6), (300, 12, 12), (MOST_ROWS_OF_WORK + 90, 6, 4), (120, MOST_EXPERTS + 40, MOST_EXPERTS + 40)],
)
def test_the_sums_are_those_of_experts_that_arrive(
    kernel: TokenExperts, tokens: int, count: int, favourites: int
) -> None:
    """With as many favourites as choices, every token chooses the same experts, so one has more rows than a job."""
    rng, experts = np.random.default_rng(tokens), Experts(count)
    chosen = torch.from_numpy(np.stack([rng.permutation(favourites)[:TOP] for _ in range(tokens)]))
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = torch.rand(tokens, TOP, generator=torch.Generator().manual_seed(2)).bfloat16()
    resident = ResidentPrompt.of(kernel, experts.matrices)
    assert resident is not None
    total, computed = resident(x, chosen, weights)
    assert computed == len(chosen.unique()) and bool(total.isfinite().all())
    assert torch.equal(total, one_by_one(kernel, experts, x, chosen, weights))


@pytest.mark.parametrize("counts", [(MOST_ROWS_OF_WORK + 88, 10), (10, MOST_ROWS_OF_WORK + 8, 10, 3)], ids=str)
def test_an_expert_with_more_rows_than_a_job_may_have(kernel: TokenExperts, counts: Sequence[int]) -> None:
    """Would catch the rest of such an expert in a job with others, with the number of all its rows."""
    experts, chosen = Experts(len(counts)), torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(3))].unsqueeze(1)
    x = torch.randn(len(chosen), HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = torch.rand(len(chosen), 1, generator=torch.Generator().manual_seed(2)).bfloat16()
    resident = ResidentPrompt.of(kernel, experts.matrices)
    assert resident is not None
    total, computed = resident(x, chosen, weights)
    assert computed == len(counts) and torch.equal(total, one_by_one(kernel, experts, x, chosen, weights))


def test_all_jobs_use_the_same_memory(kernel: TokenExperts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch memory of the first job that the second one, which is larger, replaces before both are run."""
    places, original = list[tuple[int, int]](), resident_prompt.ByteExperts

    def made(*given: Any) -> ByteExperts:
        job = original(*given)
        places.append((kernel.wide_at, kernel.pool.byte_rows(1)))
        return job

    monkeypatch.setattr(resident_prompt, "ByteExperts", made)
    chosen = torch.tensor([0] * 20 + [1] * (MOST_ROWS_OF_WORK - 5)).unsqueeze(1)
    x, weights = torch.ones(len(chosen), HIDDEN).bfloat16(), torch.ones(len(chosen), 1).bfloat16()
    resident = ResidentPrompt.of(kernel, Experts(2).matrices)
    assert resident is not None
    resident(x, chosen, weights)
    assert len(places) == 2 and places[0] == places[1]


@pytest.mark.parametrize(
    "counts",
    [[1], [600], [600, 10], [10, 600, 10], [500, 12, 1, 1300, 3], [520, 100, 100], [1] * 300, [512, 512], [511, 2]],
    ids=str,
)
def test_jobs_contain_every_row_once(counts: list[int]) -> None:
    jobs = list(resident_prompt._jobs(counts))
    ends = np.cumsum(counts)
    assert [row for _, rows in jobs for row in range(rows.start, rows.stop)] == list(range(sum(counts)))
    taken = [0] * len(counts)
    for some, rows in jobs:
        if some.stop - some.start > 1:
            assert sum(counts[some]) == rows.stop - rows.start, "only whole experts share a job"
        for n in range(some.start, some.stop):
            taken[n] += counts[n] if some.stop - some.start > 1 else rows.stop - rows.start
        assert 0 < rows.stop - rows.start <= MOST_ROWS_OF_WORK and some.stop - some.start <= MOST_EXPERTS
        owners = {int(np.searchsorted(ends, row, side="right")) for row in range(rows.start, rows.stop)}
        assert owners == set(range(some.start, some.stop))
    assert taken == counts


def test_experts_of_other_kinds_are_not_taken(kernel: TokenExperts) -> None:
    assert ResidentPrompt.of(kernel, Experts(2, BF16).matrices) is None
    mixed = Experts(2).matrices
    mixed[1] = [mixed[1][0], mixed[1][1]._replace(products=mixed[1][2].products), mixed[1][2]]
    assert ResidentPrompt.of(kernel, mixed) is None
