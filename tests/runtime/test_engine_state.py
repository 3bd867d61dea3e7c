"""The life of an engine: turns, closing, forks, caches that are not its own, contexts that do not fit."""

from __future__ import annotations

import gc
import math
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from smoe.errors import ConfigError, ContextError, EngineStateError
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
    engine = model.offload
    uses: dict[str, Callable[[], object]] = {
        "with": engine.__enter__,
        "call": lambda: model(oracle.PROMPT),
        "generate": lambda: model.generate(oracle.PROMPT, max_new_tokens=2),
        "new_cache": engine.new_cache,
        "new_caches": engine.new_caches,
        "use_alpha": lambda: engine.use_alpha(0.0),
        "use_eviction": lambda: engine.use_eviction(engine.eviction_settings),
    }
    for use in uses.values():
        with pytest.raises(EngineStateError, match="closed"):
            use()
    done, facts = engine.stats(), engine.describe()
    assert done.forward_passes == 1 and facts["slots"] and not engine.cancel()
    assert engine.now() and "closed" in repr(engine) and engine.peak_memory_bytes()


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


def test_another_engines_cache_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    """Would catch a pass whose keys are in the memory of another model; also a cache without any owner."""
    folder = toy("mixtral")
    model, other = open_model(folder), open_model(folder)
    for foreign in (other.offload.new_cache(), RowCache(model.config, 1, oracle.CONTEXT)):
        for use in (
            lambda cache=foreign: model(oracle.PROMPT, past_key_values=cache),
            lambda cache=foreign: model.generate(oracle.PROMPT, past_key_values=cache, max_new_tokens=2),
        ):
            with pytest.raises(EngineStateError, match=r"belongs to another model's engine; pass no cache, or a cache"):
                use()
        assert foreign.length == foreign.nbytes == 0
    assert model.offload.stats().forward_passes == other.offload.stats().forward_passes == 0
    model(oracle.PROMPT, past_key_values=model.offload.new_cache())


@pytest.mark.parametrize("rows", [0, -1, 81, True, "a", 1.5, None], ids=repr)
def test_an_impossible_number_of_rows_is_refused(rows: object, toy: Callable[..., Path], open_model: Open) -> None:
    """Would catch a division by zero, and rows that share fewer than a position each."""
    engine = open_model(toy("mixtral"), context_tokens=40, max_sequences=2).offload
    with pytest.raises(ConfigError, match=r"`sequences` is .*; it must be a whole number from 1 to 80") as refused:
        engine.new_cache(rows)
    assert refused.value.facts["setting"] == "sequences"
    assert engine.new_cache(80).capacity_tokens == 1


@pytest.mark.parametrize("seconds", ["x", -1, math.nan, True], ids=repr)
def test_an_impossible_wait_is_refused(seconds: object, toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("mixtral"))
    with pytest.raises(ConfigError, match=r"`timeout_seconds` is .*; it must be a number of seconds of at least 0, or"):
        model.offload.close(seconds)
    model(oracle.PROMPT)


@pytest.mark.parametrize("alpha", ["x", -1, 2, True], ids=repr)
def test_an_impossible_alpha_is_refused(alpha: object, toy: Callable[..., Path], open_model: Open) -> None:
    with pytest.raises(ConfigError, match=r"`alpha` is .*; it must be a number from 0 \(exact\) to 1"):
        open_model(toy("mixtral"), alpha=0.3).offload.use_alpha(alpha)


NOTHING = {
    "no tokens": torch.zeros(1, 0, dtype=torch.long),
    "no rows": torch.zeros(0, 3, dtype=torch.long),
    "no batch": torch.zeros(3, dtype=torch.long),
    "a list": [1, 2, 3],
}


@pytest.mark.parametrize("what", NOTHING)
def test_an_input_without_tokens_is_refused(what: str, toy: Callable[..., Path], open_model: Open) -> None:
    """transformers fails at these, too, by errors about its own operations."""
    folder, given = toy("mixtral"), NOTHING[what]
    model, theirs = open_model(folder), oracle.reference(folder)
    with pytest.raises((RuntimeError, TypeError)):
        theirs(given)
    for use in (
        lambda: model(given),
        lambda: model.generate(given, max_new_tokens=2),
        lambda: model.generate(input_ids=given, max_new_tokens=2),
    ):
        with pytest.raises(ConfigError, match=r"`input(s|_ids)` is a .*; it must be a tensor \[rows, tokens, ...\] of"):
            use()
    assert model.offload.stats().forward_passes == 0
    assert model.generate(max_new_tokens=2, min_new_tokens=2).shape == (1, 3)


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
        ContextError,
        match=r"a prompt of 24 tokens and 18 new tokens need 41 positions \(the last new token needs none\), which do "
        "not fit the context of 40 tokens .* reserved; lower `max_new_tokens` by 1, shorten the prompt by 1 or raise",
    ):
        model.generate(oracle.PROMPT, max_new_tokens=most + 1)


@pytest.mark.parametrize("asked", [{"max_new_tokens": 30}, {"max_length": 78}], ids=str)
def test_a_prompt_that_is_too_long_is_to_be_shortened(
    asked: dict[str, int], toy: Callable[..., Path], open_model: Open
) -> None:
    """Would catch the advice to generate fewer new tokens than none."""
    model = open_model(toy("mixtral"), context_tokens=40)
    long = oracle.PROMPT.repeat(1, 2)
    with pytest.raises(ContextError, match=r"48 tokens and 30 new tokens .* reserved; shorten the prompt by 37 or ra"):
        model.generate(long, **asked)
    assert model.generate(long[:, : 48 - 37], **asked | {"max_new_tokens": 30}).shape[1] <= 41


def test_sequences_that_share_a_context_are_told_so(toy: Callable[..., Path], open_model: Open) -> None:
    """Also of a cache that the caller has made."""
    model = open_model(toy("mixtral"), context_tokens=60)
    pair = oracle.PROMPT.repeat(2, 1)
    more = "need 39 positions .* the context of 30 tokens for which memory is reserved for each of 2 sequences; "
    more += "lower `max_new_tokens` by 9, shorten the prompt by 9 or raise `context_tokens` or `max_sequences`, "
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
    assert engine.config.eviction == "auto" and facts["eviction_rule"] == "fading-counts"
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
