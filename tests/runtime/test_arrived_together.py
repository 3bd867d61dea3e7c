"""Experts of a prompt whose loads have ended are computed together, those in staging slots from half of these at most.

Would catch: a call for each expert that has arrived, experts that wait in all staging slots so that nothing is read
while they are computed, another bit for another division, an expert computed before it is in its slot.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from smoe.expert import EXACT, ExpertKey
from smoe.kernels.prompt_experts import PromptExperts
from smoe.memory.reading_threads import Ticket, TicketState
from smoe.policy.plan import Load, LoadReason, Serve
from smoe.runtime.arrivals import Arrivals
from tests import gguf_toy, oracle, promised

Open = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    promised.needs_machine_code()
    file = tmp_path_factory.mktemp("arrived") / "toy.gguf"
    return gguf_toy.quantised(file, "Q4_K_M", num_experts=128, num_hidden_layers=4)[0]


def prompt(
    path: Path, open_model: Open, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> tuple[torch.Tensor, list[int], int]:
    """Return the last logits of a prompt, the numbers of experts in staging slots that were computed together, and the
    number of these slots. `has_ended`: whether every load that has begun counts as ended when an expert is added."""

    def needs_no_wait(self: Arrivals, key: ExpertKey) -> bool:
        ticket = self.tickets.get(key)
        if has_ended and ticket is not None:
            ticket.join()
        return has_ended and (ticket is not None or key in self.table.ready)

    ends = [0]
    flush, served = PromptExperts.flush, Arrivals.served

    def flushed(self: PromptExperts) -> int:
        done = flush(self)
        if done:
            ends.append(ends[-1])
        return done

    def counted(self: Arrivals, serve: Serve, computed: int) -> None:
        ends[-1] += serve.key in self.table.staged
        served(self, serve, computed)

    with monkeypatch.context() as changed:
        changed.setattr(Arrivals, "needs_no_wait", needs_no_wait)
        changed.setattr(PromptExperts, "flush", flushed)
        changed.setattr(Arrivals, "served", counted)
        model = open_model(path, "half", prefetch="none")
        model.offload.executor.leave_filling(lambda: True)  # every expert passes through a staging slot
        with torch.no_grad():
            logits = model(oracle.PROMPT, logits_to_keep=1).logits
        slots = model.offload.executor.table.pool(0).staging_slots
    return logits, [b - a for a, b in pairwise(ends)], slots


def test_experts_that_have_arrived_are_computed_together(
    path: Path, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, sizes_alone, slots = prompt(path, open_model, monkeypatch, has_ended=False)
    together, sizes, _ = prompt(path, open_model, monkeypatch, has_ended=True)
    assert slots >= 4
    assert sum(sizes) == sum(sizes_alone) > 10 * slots
    assert sizes_alone.count(1) > len(sizes_alone) * 0.8  # the others had been read ahead for the next layer
    assert max(sizes_alone) <= slots // 2
    assert max(sizes) == slots // 2
    assert len(sizes) < len(sizes_alone)
    assert torch.equal(alone, together)


def test_which_experts_need_no_wait(path: Path, open_model: Open) -> None:
    arrivals = open_model(path, "half", prefetch="none").offload.executor.arrivals
    key = (1, 3, EXACT)
    assert not arrivals.needs_no_wait(key)
    for end, error in ((TicketState.DONE, None), (TicketState.FAILED, OSError())):
        ticket = arrivals.tickets[key] = Ticket(Load(key, 0, None, True, LoadReason.DEMAND, 0), None)
        assert not arrivals.needs_no_wait(key)
        ticket.finish(end, error)
        assert arrivals.needs_no_wait(key)
        del arrivals.tickets[key]
    arrivals.fill([key[:2]])
    arrivals.tickets[key].join()
    arrivals.collect()
    assert not arrivals.tickets
    assert arrivals.needs_no_wait(key)
