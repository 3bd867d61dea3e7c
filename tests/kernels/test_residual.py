"""Residual sums and norms of many rows, compared with torch's operations and the norm of single rows.

Would catch: another rounding of a sum, totals that are added before they are rounded, rows left out at the end of a
unit, a norm of the sum's addends.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from smoe.kernels import residual
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.token_attention import Norm

pytestmark = pytest.mark.skipif(widest() is None, reason="needs llvmlite and AVX2")
SIZE, EPS = 192, 1e-6
ROWS = [1, 3, 4, 5, 70]


@pytest.fixture(scope="module")
def pool() -> Iterator[SpinningPool]:
    with SpinningPool(2, in_own_order=True) as made:
        yield made


def numbers(*sizes: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return numbers(SIZE, seed=9).bfloat16()


def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm as transformers computes it."""
    numbers = x.float()
    return weight * (numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16()


@pytest.mark.parametrize("rows", ROWS)
def test_sums_and_norms_have_torchs_bits(rows: int, pool: SpinningPool, weight: torch.Tensor) -> None:
    x, y = (numbers(1, rows, SIZE, seed=seed).bfloat16() for seed in (1, 2))
    norm = Norm(weight.data_ptr, SIZE, EPS)
    after, found = residual.added_and_normed(pool, x, y, norm)
    assert torch.equal(after, x + y) and torch.equal(found, theirs(x + y, weight))
    assert torch.equal(residual.normed(pool, x, norm), theirs(x, weight))


@pytest.mark.parametrize("rows", ROWS)
def test_totals_are_rounded_before_they_are_added(rows: int, pool: SpinningPool) -> None:
    x, totals = numbers(1, rows, SIZE, seed=1).bfloat16(), numbers(rows, SIZE, seed=2)
    wanted = x + totals.bfloat16()
    assert torch.equal(residual.added(pool, x, totals), wanted)
    assert not torch.equal((x + totals).bfloat16(), wanted), "the order matters"
