"""The life of an engine: turns, closing, forks, caches that are not its own, contexts that do not fit."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from smoe.errors import ContextError, EngineStateError
from smoe.metrics import Counters
from smoe.models.kv_cache import RowCache
from tests import oracle
from tests.threads import engine_threads

Open = Callable[..., PreTrainedModel]


def test_close_is_idempotent_and_final(toy: Callable[..., Path], open_model: Open) -> None:
    before = engine_threads()
    model = open_model(toy("mixtral"))
    model(oracle.PROMPT)
    assert engine_threads() - before
    for _ in range(3):
        model.offload.close()
    assert not engine_threads() - before
    for use in (lambda: model(oracle.PROMPT), lambda: model.generate(oracle.PROMPT, max_new_tokens=2)):
        with pytest.raises(EngineStateError, match="closed"):
            use()


def test_context_manager_closes(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    with model.offload as engine:
        assert engine is model.offload
        model(oracle.PROMPT)
    with pytest.raises(EngineStateError):
        model(oracle.PROMPT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_told_so(toy: Callable[..., Path], open_model: Open) -> None:
    """Its reading threads do not exist; would catch a child that waits for them for ever."""
    model = open_model(toy("mixtral"))
    expected = model(oracle.PROMPT).logits
    child = os.fork()
    if child == 0:
        try:
            model(oracle.PROMPT)
        except EngineStateError as error:
            model.offload.close()  # may be called, must not wait for threads that are not there
            os._exit(17 if "fork" in str(error) else 18)
        except BaseException:
            os._exit(19)
        os._exit(20)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 17
    assert torch.equal(model(oracle.PROMPT).logits, expected)


def test_two_threads_take_turns(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen2_moe")
    model = open_model(folder, "fifth", max_sequences=2)
    prompts = [oracle.PROMPT, oracle.PROMPT.flip(1)]
    theirs = oracle.reference(folder)
    expected = [theirs.generate(p, max_new_tokens=12, min_new_tokens=12, do_sample=False) for p in prompts]
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        torch.set_num_threads(1)
        results[number] = model.generate(prompts[number], max_new_tokens=12, min_new_tokens=12, do_sample=False)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[number], expected[number]) for number in (0, 1))
    model.offload.executor.table.check()


def test_a_foreign_cache_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    foreign = DynamicCache(config=model.config)
    for use in (
        lambda: model(oracle.PROMPT, past_key_values=foreign),
        lambda: model.generate(oracle.PROMPT, past_key_values=foreign, max_new_tokens=2),
    ):
        with pytest.raises(EngineStateError, match="DynamicCache"):
            use()


def test_a_cache_for_other_rows_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"), max_sequences=2)
    with pytest.raises(EngineStateError, match="2 sequences"):
        model(oracle.PROMPT, past_key_values=model.offload.new_cache(2))


def test_what_does_not_fit_the_context_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    """A prompt, and more new tokens than there is room for, before any is computed; afterwards the engine goes on."""
    folder = toy("mixtral")
    model = open_model(folder, context_tokens=40)
    with pytest.raises(ContextError, match="40"):
        model(oracle.PROMPT.repeat(1, 2))
    with pytest.raises(ContextError, match="`context_tokens`"):
        model.generate(oracle.PROMPT, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    assert model.offload.stats().forward_passes == 0, "refused after work that is thrown away"
    fits = model.generate(oracle.PROMPT, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    assert torch.equal(fits, oracle.reference_steps(folder).tokens[:, : fits.shape[1]])


def test_as_many_new_tokens_as_fit_are_generated(toy: Callable[..., Path], open_model: Open) -> None:
    """To the last position, the last token needing none; one more is refused by its number."""
    model = open_model(toy("mixtral"), context_tokens=40)
    most = 40 - oracle.PROMPT_TOKENS + 1
    assert model.generate(oracle.PROMPT, max_new_tokens=most, min_new_tokens=most).shape[1] == 41
    with pytest.raises(
        ContextError, match=r"41 tokens .* of 40 tokens .* reserved; lower `max_new_tokens` by 1, shorten"
    ):
        model.generate(oracle.PROMPT, max_new_tokens=most + 1)


def test_sequences_that_share_a_context_are_told_so(toy: Callable[..., Path], open_model: Open) -> None:
    """Also of a cache that the caller has made."""
    model = open_model(toy("mixtral"), context_tokens=60)
    pair = oracle.PROMPT.repeat(2, 1)
    more = "39 tokens do not fit the context of 30 tokens for which memory is reserved for each of 2 sequences; "
    more += "lower `max_new_tokens` by 9, shorten the prompt or raise `context_tokens` or `max_sequences`, "
    more += "whose product all sequences share"
    for given in ({}, {"past_key_values": model.offload.new_cache(2)}):
        with pytest.raises(ContextError, match=more):
            model.generate(pair, max_new_tokens=16, **given)
    assert model.offload.stats().forward_passes == 0
    assert model.generate(pair, max_new_tokens=7, min_new_tokens=7).shape[1] == 31


def test_several_caches_retire_the_oldest(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"), max_sequences=2)
    first, second = model.offload.new_cache(), model.offload.new_cache()
    assert first.capacity_tokens == 2 * oracle.CONTEXT  # one row may use what two would
    assert first.reserved_tokens == 0 and second.reserved_tokens == 2 * oracle.CONTEXT
    with pytest.raises(EngineStateError, match="newer"):
        model(oracle.PROMPT, past_key_values=first)
    model(oracle.PROMPT, past_key_values=second)


def test_caches_never_hold_more_than_the_ledger_says(toy: Callable[..., Path], open_model: Open) -> None:
    """Would catch a generation whose cache outlives it: a second one would double the budget."""
    model = open_model(toy("mixtral"))
    limit = model.offload.ledger.entries()["KV cache"]
    caches = []
    for _ in range(3):
        cache = model.offload.new_cache()
        caches.append(cache)
        model(oracle.PROMPT, past_key_values=cache)
        assert 0 < sum(each.nbytes for each in caches) <= limit
    model.generate(oracle.PROMPT, max_new_tokens=4)
    assert sum(each.nbytes for each in caches) == 0


def test_a_forgotten_model_leaves_no_cycle_of_caches(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    for _ in range(3):
        model(oracle.PROMPT)
    gc.collect()
    assert sum(isinstance(each, RowCache) and each.nbytes > 0 for each in gc.get_objects()) <= 1


def test_counters_are_an_interval(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"), "fifth")
    model(oracle.PROMPT)
    before = model.offload.stats()
    model.generate(oracle.PROMPT, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    passed = model.offload.stats() - before
    assert (passed.forward_passes, passed.tokens) == (5, oracle.PROMPT_TOKENS + 4)
    assert passed.decode_uses == 4 * 4 * 2
    assert passed.bytes_read >= passed.loads * model.offload.store.expert_bytes > 0
    parts = passed.wait_seconds + passed.compute_seconds + passed.plan_seconds + passed.dense_seconds
    assert parts == pytest.approx(passed.forward_seconds)
    assert before - before == Counters()
    assert Counters().hit_ratio == 1
    assert Counters(decode_uses=4, decode_hits=3).hit_ratio == 0.75


def test_describe_adds_up(toy: Callable[..., Path], open_model: Open) -> None:
    engine = open_model(toy("mixtral"), "half").offload
    facts = engine.describe()
    assert sum(facts["bytes"].values()) <= facts["memory_budget_bytes"]
    assert facts["slots"] == 16 and facts["resident_share"] == 0.5
    assert engine.config.eviction == "auto" and facts["eviction_rule"] == "fading"
    assert engine.peak_memory_bytes() <= facts["memory_budget_bytes"]


def test_closing_gives_the_slots_memory_back(toy: Callable[..., Path]) -> None:
    """At once, not when the cycles around a model are collected: the next model may need it."""
    model = oracle.open_model(toy("qwen3_moe", dtype=torch.bfloat16), "full")
    oracle.greedy(model)
    memory = weakref.ref(model.offload._arena._map)
    assert memory() is not None
    model.offload.close()
    assert memory() is None


def test_a_load_gives_the_weights_of_closed_models_back_first(toy: Callable[..., Path], open_model: Open) -> None:
    """They lie in circles: without looking for them, a second model of gigabytes would be loaded beside the first."""
    gc.disable()
    try:
        folder = toy("qwen3_moe")
        model = oracle.open_model(folder, "half")
        gone = weakref.ref(model)
        model.offload.close()
        del model
        assert gone() is not None, "no circles: this test tests nothing"
        open_model(folder, "half")
        assert gone() is None
    finally:
        gc.enable()
