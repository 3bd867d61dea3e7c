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

from smoe.fastpath import linear
from tests import oracle, promised

ALL = frozenset(promised.PROOFS)
WIDE = {"hidden_size": 256, "moe_intermediate_size": 64, "head_dim": 64}
NEW_TOKENS = 6


ONE = [{kernel} for kernel in promised.PROOFS]
SEVERAL = [ALL - {"experts"}, ALL - {"experts", "linears"}, ALL]


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, which would decline our products; and the number of threads is put back."""
    monkeypatch.setattr(linear, "_faster", lambda pool, kinds, parts: {k: p for k, p in parts.items() if p})
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("threads", "disagreeing"),
    [
        *((1, kernels) for kernels in ONE + SEVERAL),
        *(pytest.param(2, {kernel}, marks=pytest.mark.slow) for kernel in ("attention", "linears")),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "+".join(sorted(value)),
)
def test_whatever_agrees_the_model_is_exact(
    threads: int,
    disagreeing: set[str],
    toy: Callable[..., Path],
    open_model: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(threads)
    promised.disagree(monkeypatch, *disagreeing)
    folder = toy("qwen3_moe", dtype=torch.bfloat16, **WIDE)
    model = open_model(folder, "half", kernels="native")
    theirs = oracle.greedy(oracle.reference(folder), new_tokens=NEW_TOKENS)
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=NEW_TOKENS), theirs)
    assert not adopted(model) & disagreeing


def adopted(model: PreTrainedModel) -> set[str]:
    """Which of our kernels a model has, as far as its modules tell."""
    modules = list(model.modules())
    found = {
        "experts": model.offload.executor.compute.experts.spinning_pool is not None,
        "attention": any(hasattr(module, "one_query") for module in modules),
        "norms": any("forward" in vars(module) for module in modules if "RMSNorm" in type(module).__name__),
    }
    return {name for name, is_there in found.items() if is_there}
