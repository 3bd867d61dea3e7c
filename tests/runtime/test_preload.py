"""Reading every expert ahead where the budget holds them all: in the background, and only where nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe import from_pretrained
from smoe.machine.processor import reading_threads
from smoe.memory.expert_files import DiskReader
from smoe.memory.movers import Filler
from tests import oracle

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
