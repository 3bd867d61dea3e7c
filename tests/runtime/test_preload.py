"""Reading every expert ahead where the budget holds them all: in the background, and only where nobody waits."""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.expert import EXACT
from smoe.generation.loop import DecodeLoop
from smoe.generation.request import Request
from smoe.generation.sampling_settings import Sampling
from smoe.machine.processor import reading_threads
from smoe.memory.expert_files import DiskReader
from smoe.memory.movers import Filler
from smoe.memory.reading_threads import TicketState
from smoe.server.first_pass import first_pass
from tests import oracle
from tests.generation.test_loop import NoText

Open = Callable[..., PreTrainedModel]


def wait_for_all(model: PreTrainedModel) -> None:
    arrivals, deadline = model.offload.executor.arrivals, time.monotonic() + 20
    while any(not ticket.is_over for ticket in arrivals.tickets.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    arrivals.collect()


def test_what_fits_is_read_without_being_asked_for(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("qwen3_moe"), "full", preload=None)
    wait_for_all(model)
    engine = model.offload
    assert len(engine.executor.table.ready) == engine.ledger.demand.total_experts
    model.generate(oracle.PROMPT, max_new_tokens=4)
    stats = engine.stats()
    assert stats.loads == 0 and stats.hit_ratio == 1.0
    engine.executor.table.check()


@pytest.mark.parametrize("budget", ["half", "minimum"])
def test_what_does_not_fit_is_left_to_be_asked_for(budget: str, toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("qwen3_moe"), budget, preload=None)
    assert not model.offload.executor.arrivals.tickets
    asked = open_model(toy("qwen3_moe"), budget, preload=True)
    wait_for_all(asked)
    assert len(asked.offload.executor.table.ready) == asked.offload.ledger.cache_slots


def test_a_request_does_not_wait_for_the_rest(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own experts come first, the logits are the model's, and closing ends what is under way."""
    read = DiskReader.read

    def slow(self, *args, **kwargs):
        time.sleep(0.002)
        return read(self, *args, **kwargs)

    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    theirs = oracle.reference_steps(folder)
    monkeypatch.setattr(DiskReader, "read", slow)
    ours = open_model(folder, "full", preload=True)
    oracle.assert_same_steps(oracle.greedy(ours), theirs)
    again = from_pretrained(folder, memory="64MiB", context_tokens=oracle.CONTEXT)
    assert again.offload.executor.arrivals.tickets
    again.offload.close()


def test_an_expert_that_cannot_be_read_fails_only_who_wants_it(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = DiskReader.read, []

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 30:
            raise OSError("injected")
        return read(self, *args, **kwargs)

    monkeypatch.setattr(DiskReader, "read", failing)
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    model = open_model(folder, "full", preload=True)
    wait_for_all(model)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    model.offload.executor.table.check()


def test_a_prompt_reads_its_experts_before_all_others(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the experts that a prompt does not use, only those are read that were being read when it began. The others
    follow after it."""
    fill, read = Filler.fill, []

    def slow(self, key, *args):
        read.append(key[:2])
        time.sleep(0.005)
        return fill(self, key, *args)

    model = open_model(toy("qwen3_moe"), "full", preload=False)
    monkeypatch.setattr(Filler, "fill", slow)
    engine = model.offload
    engine.executor.arrivals.preload()
    with engine.recording() as steps:
        model(oracle.PROMPT[:, :2])
    used = {(step.layer, expert) for step in steps for row in step.top_k_index for expert in row}
    at_the_end = set(read)
    assert used <= at_the_end
    # besides: loads that ran when the prompt began, and those that its predictor requested
    assert len(at_the_end - used) <= reading_threads(engine.config) + engine.stats().prefetches
    wait_for_all(model)
    assert len(engine.executor.table.ready) == engine.ledger.demand.total_experts
    engine.executor.table.check()


def test_free_slots_are_filled_while_no_text_is_computed(toy: Callable[..., Path], open_model: Open) -> None:
    """The given experts come first, then some of each layer; a pass ends it, and `fill` continues. The text stays that
    of the model."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    model = open_model(folder, "half", preload=None)
    engine = model.offload
    table, first = engine.executor.table, engine.store.keys()[-1]
    engine.fill_when_idle([first, first, (99, 99)])
    assert (*first, EXACT) in table.inflight or (*first, EXACT) in table.ready
    wait_for_all(model)
    assert len(table.ready) == engine.ledger.cache_slots < engine.ledger.demand.total_experts
    of_layers = Counter(layer for layer, _, _ in table.ready)
    assert max(of_layers.values()) - min(of_layers.values()) <= 2
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    assert not engine.executor.arrivals.tickets, "nothing is read for later while a text is computed"
    table.check()


def test_each_expert_is_queued_once_where_more_slots_are_free_than_experts_are_given(
    toy: Callable[..., Path], open_model: Open
) -> None:
    """Would catch a start that fails because the last run had less memory."""
    model = open_model(toy("qwen3_moe"), "half", preload=None)
    engine = model.offload
    engine.fill_when_idle(engine.store.keys()[: engine.ledger.cache_slots // 2])
    wait_for_all(model)
    assert len(engine.executor.table.ready) == engine.ledger.cache_slots
    engine.executor.table.check()


def test_a_text_of_one_new_token_ends_the_filling_too(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only pass is no prompt. Would catch gigabytes that are read while an answer is regenerated."""
    model = open_model(toy("qwen3_moe"), "half", preload=None)
    engine, queued = model.offload, list[int]()
    engine.fill_when_idle([])
    step = DecodeLoop.step
    monkeypatch.setattr(
        DecodeLoop,
        "step",
        lambda loop: queued.append(_queued(engine)) or step(loop),  # type: ignore[func-returns-value]
    )
    loop = DecodeLoop(model, NoText())
    loop.hand_in(Request(range(1), Sampling(max_new_tokens=1, ignores_end=True), lambda what: None))
    loop.run(until_idle=True)
    assert queued[0] == 0


def _queued(engine: Any) -> int:
    tickets = engine.executor.arrivals.tickets.values()
    return sum(ticket.state is TicketState.QUEUED for ticket in tickets)


def test_a_loop_that_is_idle_fills_what_became_free(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("qwen3_moe"), "half", preload=None)
    engine = model.offload
    engine.fill_when_idle([])
    wait_for_all(model)
    engine.executor.reset(engine.fresh_eviction())
    loop = DecodeLoop(model, NoText())
    loop.hand_in(Request(range(3), Sampling(max_new_tokens=2, ignores_end=True), lambda what: None))
    loop.run(until_idle=True)
    wait_for_all(model)
    assert len(engine.executor.table.ready) == engine.ledger.cache_slots


@pytest.mark.parametrize("is_cached", [True, False])
def test_the_first_prompt_leaves_free_slots_to_the_background_if_its_file_is_cached(
    is_cached: bool, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt fills its share of the slots, and both have the model's logits."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    model = open_model(folder, "half", preload=None)
    engine = model.offload
    kept = list[bool]()
    read = DiskReader.read

    def noted(self: DiskReader, *given: Any) -> int:
        kept.append(given[3])
        return read(self, *given)

    monkeypatch.setattr(Filler, "is_cached", lambda filler: is_cached)
    engine.fill_when_idle([])
    engine.pause_filling()
    engine.executor.reset(engine.fresh_eviction())
    monkeypatch.setattr(DiskReader, "read", noted)
    first = model(oracle.PROMPT).logits
    assert bool(engine.executor.table.ready) is not is_cached
    assert any(kept) is not is_cached, "experts that only pass stay in the page cache"
    second = model(oracle.PROMPT).logits
    assert len(engine.executor.table.ready) > 0 and any(kept)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("budget", "settings"),
    [
        ("half", {"preload": False}),
        ("half", {"preload": None, "alpha": 0.5, "reproducible": True}),
        ("full", {"preload": None}),
    ],
)
def test_what_must_not_be_filled_is_not(
    budget: str, settings: dict[str, Any], toy: Callable[..., Path], open_model: Open
) -> None:
    """A text that depends on residents must be the same in every run; and where all experts fit, they are loaded
    anyway."""
    model = open_model(toy("qwen3_moe"), budget, **settings)
    engine = model.offload
    wait_for_all(model)
    engine.executor.reset(engine.fresh_eviction())
    engine.fill_when_idle(engine.store.keys())
    engine.fill()
    assert not engine.executor.arrivals.tickets and not engine.executor.table.ready


def test_a_first_pass_without_reads_leaves_nothing_filled(toy: Callable[..., Path], open_model: Open) -> None:
    """Its experts are zero: an expert that counted as loaded then would be zero for every text."""
    folder = toy("qwen3_moe", dtype=torch.bfloat16)
    model = open_model(folder, "half", preload=None)
    model.offload.fill_when_idle([])
    first_pass(model, NoText())
    if Path("/proc/self/pagemap").exists():
        assert not _mapped_pages(model.offload._arena), "replacing pages that were only read is slower than writing"
    assert not model.offload.executor.table.ready and not model.offload.executor.arrivals.tickets
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def _mapped_pages(arena: Any) -> int:
    """Return how many pages of an arena's memory are in this process's page table."""
    with Path("/proc/self/pagemap").open("rb") as table:
        table.seek(arena.address(0) // mmap.PAGESIZE * 8)
        entries = np.frombuffer(table.read(arena.nbytes // mmap.PAGESIZE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum())
