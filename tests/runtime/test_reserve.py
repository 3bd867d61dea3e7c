"""Experts in memory that is reserved and not used: nothing that is computed changes, and the budget holds.

Would catch: an expert that is read from a slot whose memory was given back, positions that have no memory when they
are written, slots that never come back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.runtime.engine import Engine
from tests import oracle

Open = Callable[..., PreTrainedModel]
CONTEXT = 256
LONG = 200


def engine_of(model: Any) -> Engine:
    engine: Engine = model.offload
    return engine


def slots(engine: Engine) -> int:
    return sum(pool.cache_slots for pool in engine.executor.table.pools)


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(3, 128, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def generated(model: Any, ids: torch.Tensor, new_tokens: int = 6) -> torch.Tensor:
    made = model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return torch.stack(made.logits)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_the_same_bits(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """A short text, a long one that takes the memory back, and the short one again."""
    folder = toy(family)
    lent = open_model(folder, "minimum", context_tokens=CONTEXT, lend_reserve=True)
    engine = engine_of(lent)
    assert engine.ledger.most_slots > engine.ledger.cache_slots, "nothing was lent"
    reference = oracle.reference(folder)
    for tokens in (20, LONG, 20):
        ids = prompt(tokens)
        assert torch.equal(generated(lent, ids), generated(reference, ids)), f"a prompt of {tokens} tokens"
        engine.executor.table.check()
    assert engine.peak_memory_bytes() <= engine.ledger.budget_bytes


def test_slots_follow_what_is_used(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"), "minimum", context_tokens=CONTEXT, lend_reserve=True)
    engine = engine_of(model)
    assert slots(engine) == engine.ledger.cache_slots, "the first prompt may be long"
    generated(model, prompt(20))
    short = slots(engine)
    assert short > engine.ledger.cache_slots
    generated(model, prompt(LONG), 1)
    assert slots(engine) < short, "the prompt has its memory"
    withdrawn = [slot for pool in engine.executor.table.pools for slot in pool.withdrawn]
    assert withdrawn and not any(engine._arena.tensor(slot).any() for slot in withdrawn), "its pages are another's"
    generated(model, prompt(20))
    assert slots(engine) == short, "and has given it back"


@pytest.mark.parametrize(("context", "tokens"), [(CONTEXT, 20), (CONTEXT, 200), (200, 150), (240, 235)])
def test_the_slots_of_a_text_are_foretold(
    toy: Callable[..., Path], open_model: Open, context: int, tokens: int
) -> None:
    """Of the same budget, by its sizes alone (`smoe plan`): as many as at the text's last token."""
    model = open_model(toy("mixtral"), "minimum", context_tokens=context, lend_reserve=True)
    ledger = engine_of(model).ledger
    generated(model, prompt(tokens - 6))
    assert ledger.slots_of_text(tokens) == slots(engine_of(model)) <= ledger.most_slots
    assert ledger.slots_of_text(context * 9) >= ledger.cache_slots


def test_slots_are_withdrawn_before_positions_are_written(toy: Callable[..., Path], open_model: Open) -> None:
    """Between passes, too: a text that is moved writes positions."""
    model = open_model(
        toy("mixtral"), "minimum", context_tokens=CONTEXT, max_sequences=4, prefill_tokens=64, lend_reserve=True
    )
    engine = engine_of(model)
    generated(model, prompt(20))
    before = slots(engine)
    cache = engine.new_cache(4)
    cache.back(0, 4, CONTEXT)
    assert slots(engine) == sum(engine.ledger.slots_after(engine.ledger.demand.kv_cache_bytes)) < before
    engine.executor.table.check()


def test_a_pool_of_loads_under_way_shrinks(toy: Callable[..., Path], open_model: Open) -> None:
    """What is being read into the cache ends, one way or the other, before its slot is given back."""
    model = open_model(toy("mixtral"), "half", context_tokens=CONTEXT, lend_reserve=True)
    engine = engine_of(model)
    generated(model, prompt(20))
    arrivals, pool = engine.executor.arrivals, engine.executor.table.pools[0]
    arrivals.reset(engine.fresh_eviction())
    arrivals.preload()
    least = engine.ledger.pools[0].cache
    arrivals.resize(pool, least)
    assert pool.cache_slots == least
    engine.executor.table.check()
    assert torch.equal(generated(model, prompt(24)), generated(oracle.reference(toy("mixtral")), prompt(24)))


@pytest.mark.parametrize(
    "switches", [{"lend_reserve": False}, {"device": "emulated"}, {"expert_cache": "top-k"}], ids=str
)
def test_where_nothing_is_lent(switches: dict[str, Any], toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"), "half", **{"context_tokens": CONTEXT, "lend_reserve": True} | switches)
    ledger = engine_of(model).ledger
    assert ledger.most_slots == ledger.cache_slots
