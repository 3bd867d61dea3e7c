"""Experts that are smaller than the cost of a call: a layer waits for all of them and computes them together.

Would catch: a call for each expert that has arrived, an expert computed before it is in its slot, a load that waits for
the slot of an expert which waits for the load, another bit where experts are large.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.compute.expert_math import add_rows
from smoe.kernels.experts import TokenExperts
from smoe.runtime import layer
from tests import oracle

Open = Callable[..., PreTrainedModel]
SIZES = {"small": 1 << 40, "large": 0}
"""The limit of a small expert under which all experts, or none, are small."""


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
@pytest.mark.parametrize("budget", ["half", "minimum"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_size_of_experts_changes_no_bit(
    family: str,
    size: str,
    budget: str,
    prefetch: str,
    toy: Callable[..., Path],
    open_model: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer, "_SMALL_EXPERT_BYTES", SIZES[size])
    folder = toy(family, dtype=torch.bfloat16)
    model = open_model(folder, budget, prefetch=prefetch)
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=6), oracle.reference_steps(folder).first(6))
    assert model.offload.stats().loads > model.offload.ledger.cache_slots
    model.offload.executor.table.check()


def calls_of_a_token(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the number of calls of the experts' kernel in some decode steps with missing experts, and the number of
    layers that these steps have passed."""
    calls: list[str] = []

    def counted(name: str) -> None:
        original = getattr(TokenExperts, name)

        def call(self: TokenExperts, *given: Any) -> None:
            calls.append(name)
            original(self, *given)

        monkeypatch.setattr(TokenExperts, name, call)

    model = from_pretrained(
        "demo", memory="20MiB", context_tokens=512, prefill_tokens=256, kernels="own-order", prefetch="none"
    )
    with model.offload as engine, torch.no_grad():
        cache, ids = engine.new_cache(), torch.arange(50, 80).unsqueeze(0)
        model(input_ids=ids[:, :10], past_key_values=cache, use_cache=True, logits_to_keep=1)
        before = engine.stats()
        counted("forward")
        counted("one_token")
        for n in range(10, 16):
            model(input_ids=ids[:, n : n + 1], past_key_values=cache, use_cache=True)
        after = engine.stats()
        layers = 6 * len(engine.store.layers)
    assert after.decode_hits - before.decode_hits < after.decode_uses - before.decode_uses  # experts were missing
    return len(calls), layers


def test_small_experts_are_computed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, layers = calls_of_a_token(monkeypatch)
    assert calls == layers


def test_large_experts_are_computed_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_SMALL_EXPERT_BYTES", 0)
    calls, layers = calls_of_a_token(monkeypatch)
    assert calls > layers


class NotedThreads(torch.overrides.TorchFunctionMode):
    """Notes with how many threads torch adds rows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.index_add_:
            self.found.append(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


def test_rows_are_added_by_one_thread() -> None:
    """Would catch a wait for a thread whose core another program has: milliseconds for each expert of a prompt."""
    before, total = torch.get_num_threads(), torch.zeros(4, 3)
    with NotedThreads() as noted:
        add_rows(total, torch.tensor([2, 0, 2]), torch.tensor([[1.0] * 3, [2.0] * 3, [4.0] * 3]))
    assert noted.found == [1]
    assert torch.get_num_threads() == before
    assert total[:, 0].tolist() == [2, 0, 5, 0]
