"""Machines on which only some of our kernels agree with torch: the rest is left to it, and every bit is the same.

On Intel's CPUs with AMX, torch sums attention in an order that ours does not know; elsewhere it may be any other. Here
the proofs are told to fail. Would catch one kernel that needs another's, or that leaves fewer threads to what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.runtime import dense
from tests import machine, oracle

ALL = frozenset(machine.PROOFS)
WIDE = {"hidden_size": 256, "moe_intermediate_size": 64, "head_dim": 64}
NEW_TOKENS = 6


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And no timing, which would decline our products."""
    monkeypatch.setattr(dense, "_faster", lambda crew, kinds, parts: {k: p for k, p in parts.items() if p})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def theirs(toy: Callable[..., Path]) -> tuple[Path, oracle.Steps]:
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **WIDE)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return folder, oracle.greedy(oracle.reference(folder), new_tokens=NEW_TOKENS)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "disagreeing",
    [*({kernel} for kernel in machine.PROOFS), ALL - {"experts"}, ALL - {"experts", "linears"}, ALL],
    ids=lambda kernels: "+".join(sorted(kernels)),
)
def test_whatever_agrees_the_model_is_exact(
    disagreeing: frozenset[str],
    theirs: tuple[Path, oracle.Steps],
    open_model: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.disagree(monkeypatch, *disagreeing)
    folder, steps = theirs
    model = open_model(folder, "half", kernels="own")
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=NEW_TOKENS), steps)
    assert not adopted(model) & disagreeing


def adopted(model: PreTrainedModel) -> set[str]:
    """Which of our kernels a model has, as far as its modules tell."""
    modules = list(model.modules())
    found = {
        "experts": model.offload.executor.math.crew is not None,
        "attention": any(hasattr(module, "one_query") for module in modules),
        "norms": any("forward" in vars(module) for module in modules if "RMSNorm" in type(module).__name__),
    }
    return {name for name, is_there in found.items() if is_there}
