"""Grade E0: every family, at every budget, gives the bits of the unmodified transformers model with eager experts.

Would catch: a wrong order of summation, an expert read from the wrong place or into a slot still in use, gate and up
swapped, a forgotten bias, a KV cache that shows attention another shape, a wave that overwrites what it still needs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]


def assert_equal(model: PreTrainedModel, folder: Path, budget: str) -> int:
    """Generate as the reference does, and return how many tokens. Most of them at the minimum, where every token
    evicts experts."""
    tokens = oracle.NEW_TOKENS if budget == "minimum" else 6
    oracle.assert_same_steps(oracle.greedy(model, new_tokens=tokens), oracle.reference_steps(folder).first(tokens))
    return tokens


@pytest.mark.parametrize("budget", oracle.BUDGETS)
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_fp32_is_equal_at_every_budget(family: str, budget: str, toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy(family)
    model = open_model(folder, budget)
    engine = model.offload
    tokens = assert_equal(model, folder, budget)
    engine.executor.table.check()

    counters, experts = engine.stats(), engine.ledger.demand.total_experts
    assert engine.store.is_staged == (family != "granitemoe")  # fp32 rows of a toy's fused tensors happen to be aligned
    assert counters.tokens == 2 * oracle.PROMPT_TOKENS + tokens - 1
    if budget == "full":
        assert len(engine.anatomy.routers) == len(zoo.sparse_layers(model)), "a router that the probe does not see"
        assert engine.ledger.cache_slots == experts
        assert counters.loads <= experts  # each expert once
    else:
        assert engine.ledger.cache_slots < experts
        assert counters.loads > experts  # some came back: the cache really was too small
        assert counters.decode_hits < counters.decode_uses


@pytest.mark.parametrize("budget", ["half", "minimum"])
@pytest.mark.parametrize(
    ("family", "is_staged"),
    [("qwen3_moe", False), ("deepseek_v3", False), ("gpt_oss", False), ("granitemoe", False), ("mixtral", True)],
)
def test_bf16_is_equal_on_both_paths(
    family: str, is_staged: bool, budget: str, toy: Callable[..., Path], open_model: Open
) -> None:
    """In place (reads go straight into the slot) and staged (w1, w2, w3: gate and up are not neighbours)."""
    folder = toy(family, dtype=torch.bfloat16)
    model = open_model(folder, budget)
    assert model.offload.store.is_staged is is_staged
    assert model.dtype is torch.bfloat16
    assert_equal(model, folder, budget)


def test_fp16_is_equal(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen2_moe", dtype=torch.float16)
    model = open_model(folder, "minimum")
    assert model.dtype is torch.float16
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


@pytest.mark.parametrize("switches", [{"eviction": "lfu"}, {"preset": "lfu"}, {"io_threads": 1}, {"direct_io": "on"}])
def test_switches_change_no_bit(switches: dict[str, str], toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen2_moe")
    model = open_model(folder, "fifth", **switches)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


@pytest.mark.parametrize("prefetch", ["next-gate", "stacked-gates"])
@pytest.mark.parametrize("budget", ["half", "minimum"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "minimax_m2", "granitemoe"])
def test_prefetch_changes_no_bit(
    family: str, budget: str, prefetch: str, toy: Callable[..., Path], open_model: Open
) -> None:
    """Look-ahead fills staging slots beside the running layer: would catch a guess that evicts or overwrites."""
    folder = toy(family)
    model = open_model(folder, budget, prefetch=prefetch)
    assert_equal(model, folder, budget)
    counters, table = model.offload.stats(), model.offload.executor.table
    assert counters.prefetches > 0, "nothing was prefetched: this test tested nothing"
    assert 0 < counters.prefetches_used <= counters.prefetches
    table.check()
