"""Grade E1: batches and chunked prompts give the same bits at every budget, and transformers' values up to rounding.

Would catch: results that depend on the order in which experts arrive, padding that leaks into real rows, wrong
positions after a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]
LENGTHS = (20, 13, 5)
NEW_TOKENS = 12
ROUNDING = 1e-5
SOME_FAMILIES = ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe", "qwen3_next", "lfm2_moe"]


def padded_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of different lengths, padded on the left: ids and mask [3, 20]."""
    ids = torch.randint(3, 128, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(5))
    mask = torch.stack([(torch.arange(max(LENGTHS)) >= max(LENGTHS) - n).long() for n in LENGTHS])
    return ids * mask, mask


def batch_steps(model: PreTrainedModel) -> oracle.Steps:
    ids, mask = padded_batch()
    steps = oracle.greedy(model, ids, NEW_TOKENS, attention_mask=mask)
    return steps._replace(prefill=steps.prefill[mask.bool()])  # what stands at padding means nothing


def assert_close(ours: oracle.Steps, theirs: oracle.Steps) -> None:
    assert oracle.relative_error(ours.prefill, theirs.prefill) <= ROUNDING
    assert torch.equal(ours.tokens, theirs.tokens)
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        assert oracle.relative_error(a, b) <= ROUNDING


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_padded_batch(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy(family)
    first = batch_steps(open_model(folder, "full", max_sequences=3))
    assert_close(first, batch_steps(oracle.reference(folder)))
    oracle.assert_same_steps(batch_steps(open_model(folder, "minimum", max_sequences=3)), first)


def test_padded_batch_with_prefetch(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen2_moe")
    first = batch_steps(open_model(folder, "full", max_sequences=3))
    model = open_model(folder, "fifth", max_sequences=3, prefetch="next-gate")
    oracle.assert_same_steps(batch_steps(model), first)
    assert model.offload.stats().prefetches_used > 0


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_chunked_prefill(family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """`prefill_tokens` of the configuration chunks inside generate, at every budget alike."""
    folder = toy(family)
    model = open_model(folder, "full", prefill_tokens=7)
    first = oracle.greedy(model, new_tokens=NEW_TOKENS)
    passes = model.offload.stats().forward_passes
    assert passes == 1 + -(-oracle.PROMPT_TOKENS // 7) + NEW_TOKENS - 1, "the prompt was not read in chunks"
    assert_close(first, oracle.greedy(oracle.reference(folder), new_tokens=NEW_TOKENS))
    for budget in ("half", "minimum"):
        again = open_model(folder, budget, prefill_tokens=7)
        oracle.assert_same_steps(oracle.greedy(again, new_tokens=NEW_TOKENS), first)


def test_chunk_size_of_the_call_wins(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"), "fifth")
    whole = model.generate(oracle.PROMPT, max_new_tokens=8, do_sample=False)
    before = model.offload.stats()
    chunked = model.generate(oracle.PROMPT, max_new_tokens=8, do_sample=False, prefill_chunk_size=5)
    assert torch.equal(whole, chunked)
    assert (model.offload.stats() - before).forward_passes == -(-oracle.PROMPT_TOKENS // 5) + 7


def test_padding_loads_no_experts(toy: Callable[..., Path], open_model: Open) -> None:
    """Would catch padding rows that are routed: they would use experts that no real token uses."""
    folder = toy("qwen3_moe")
    ids, _ = padded_batch()
    row, mask = ids[:1].clone(), torch.zeros(1, max(LENGTHS), dtype=torch.long)
    mask[0, -1] = 1
    model = open_model(folder, "full")
    with model.offload.recording() as trace:
        model(row, attention_mask=mask)
    layers, top_k = len(zoo.sparse_layers(model)), 2
    counters = model.offload.stats()
    assert counters.prefill_uses == layers * top_k
    assert counters.tokens == 1
    assert all(choice == step.experts for step in trace for choices in step.top_k_index[:-1] for choice in choices)


def test_full_padding_is_harmless(toy: Callable[..., Path], open_model: Open) -> None:
    """A row of nothing but padding routes nothing; the other row keeps its values."""
    ids, mask = padded_batch()
    mask = mask[:2].clone()
    mask[1] = 0
    model = open_model(toy("qwen3_moe"), "minimum", max_sequences=2)
    logits = model(ids[:2], attention_mask=mask).logits
    alone = model(ids[:1]).logits
    assert oracle.relative_error(logits[0], alone[0]) <= ROUNDING
