"""A softmax router of one token in machine code, compared with torch's softmax and top-k.

Would catch an expert that is chosen twice or beyond the last one, weights in another order than their experts, a
missing division, a task that is completed with another expert's matrix.
"""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.token_router import Routed, TokenRouter
from tests import promised

ROWS = 200
ROUNDING = 2.0**-7
"""Neighbours in bf16 differ by less than this part."""


@pytest.fixture(autouse=True)
def _machine_code() -> None:
    promised.needs(widest() is not None, promised.MACHINE_CODE)


def by_torch(logits: torch.Tensor, top_k: int, is_normalised: bool) -> Routed:
    weights, index = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k)
    return Routed(logits, (weights / weights.sum() if is_normalised else weights).bfloat16(), index)


def chosen_from(router: TokenRouter, logits: torch.Tensor) -> Routed:
    router.logits.copy_(logits)
    router.choose()
    return router.routed()


@pytest.mark.parametrize(("experts", "top_k"), [(64, 8), (60, 4), (8, 2), (5, 5), (130, 6)])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_experts_and_weights_are_those_of_torch(experts: int, top_k: int, is_normalised: bool) -> None:
    generator, router = torch.Generator().manual_seed(0), TokenRouter(experts, top_k, is_normalised)
    for n in range(ROWS):
        logits = (torch.randn(1, experts, generator=generator) * (1 + n % 7)).bfloat16()
        ours, theirs = chosen_from(router, logits), by_torch(logits, top_k, is_normalised)
        assert torch.equal(ours.logits, logits)
        assert torch.equal(logits[0, ours.chosen[0]], logits[0, theirs.chosen[0]]), (
            "but for equal ones, of which any do"
        )
        assert len(set(ours.chosen[0].tolist())) == top_k and int(ours.chosen.max()) < experts
        assert torch.allclose(ours.weights.float(), theirs.weights.float(), rtol=ROUNDING, atol=0)
        of_each = dict(zip(ours.chosen[0].tolist(), ours.weights[0].tolist(), strict=True))
        gains = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * top_k).from_address(router.gains_at))
        assert dict(zip(router.ascending.tolist(), gains.tolist(), strict=True)) == of_each
        assert router.ascending.tolist() == sorted(of_each)


def test_of_equal_logits_the_first_are_chosen() -> None:
    assert chosen_from(TokenRouter(8, 3, True), torch.zeros(1, 8)).chosen.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_no_number_gives_no_expert_that_is_not_there(value: float) -> None:
    routed = chosen_from(TokenRouter(6, 4, True), torch.full((1, 6), value))
    assert all(0 <= expert < 6 for expert in routed.chosen[0].tolist())
    assert bool(routed.weights.isnan().all()), "as the library has it"


def test_one_logit_that_is_no_number_makes_no_weight_a_number() -> None:
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[0, 5] = float("nan")
    assert bool(chosen_from(TokenRouter(32, 4, True), logits).weights.isnan().all())


def test_tasks_are_completed_with_the_matrices_of_the_chosen() -> None:
    router, matrices, fields = TokenRouter(16, 2, True), np.arange(48).reshape(16, 3), np.zeros(4, np.int64)
    order = [(1, 2), (0, 0), (1, 0), (0, 1)]
    places = [(fields.ctypes.data + 8 * at, n, m) for at, (n, m) in enumerate(order)]
    router.complete(matrices, np.array(places, np.int64), fields)
    routed = chosen_from(router, torch.randn(1, 16, generator=torch.Generator().manual_seed(3)).bfloat16())
    ascending = sorted(routed.chosen[0].tolist())
    assert fields.tolist() == [matrices[ascending[n], m] for n, m in order]


def test_the_memory_of_tasks_lives_as_long_as_the_router_writes_there() -> None:
    """Would catch a write into memory that was freed when an interrupt ended the caller."""
    router, fields = TokenRouter(16, 1, True), np.zeros(1, np.int64)
    seen = weakref.ref(fields)
    router.complete(np.ones((16, 1), np.int64), np.array([[fields.ctypes.data, 0, 0]], np.int64), fields)
    del fields
    assert seen() is not None
    router.complete(np.ones((16, 1), np.int64), np.zeros((0, 3), np.int64), None)
    assert seen() is None


@pytest.mark.parametrize("rows", [1, 7, 8, 300])
@pytest.mark.parametrize(("experts", "top_k"), [(64, 8), (16, 2), (256, 8)])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_several_rows_are_routed_as_each_alone(rows: int, experts: int, top_k: int, is_normalised: bool) -> None:
    """Would catch a row that takes its neighbour's logits or place, a row beyond the last one, scratch memory that two
    threads share."""
    generator, router = torch.Generator().manual_seed(0), TokenRouter(experts, top_k, is_normalised)
    logits = (3 * torch.randn(rows, experts, generator=generator)).bfloat16()
    assert router.takes_rows
    with SpinningPool(2, in_own_order=True) as pool:
        found = router.choose_each(pool, logits)
    for n, alone in enumerate(chosen_from(router, row) for row in logits.split(1)):
        assert torch.equal(found.weights[n], alone.weights[0])
        assert torch.equal(found.chosen[n], alone.chosen[0])


@pytest.mark.parametrize("experts", [60, 130])
def test_rows_of_part_of_a_register_are_refused(experts: int) -> None:
    assert not TokenRouter(experts, 4, True).takes_rows
