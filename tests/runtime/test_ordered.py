"""The GPU's link under the whole engine, without a GPU: copies land later, on queues that a test moves.

Would catch: an expert computed with before its copy has landed, computing held up by prefetches that nobody wants, a
look-ahead that never happens because nothing seems to be under way.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.expert import EXACT
from smoe.load import engine_parts
from smoe.memory.link import CudaLink
from smoe.memory.reading_threads import Ticket, TicketState
from smoe.metrics import Counters
from smoe.policy.eviction.lru import LRU
from smoe.policy.plan import Load, LoadReason, Serve
from smoe.policy.residency import PoolSize, SlotTable
from smoe.runtime.arrivals import Arrivals
from tests import oracle
from tests.memory.fake_streams import PumpedStreams

Open = Callable[..., PreTrainedModel]
BENCH: dict[str, Any] = {"device": "emulated", "dilation": 1.0}


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> PumpedStreams:
    """Takes the emulated link's place: some milliseconds of the pump for each expert of a toy."""
    made = PumpedStreams(bytes_per_ms=4096)
    monkeypatch.setattr(engine_parts, "EmulatedLink", lambda _: CudaLink(made))
    return made


@pytest.mark.parametrize("switches", [{}, {"prefetch": "look-ahead"}, {"preset": "smoe-exact"}], ids=str)
def test_late_copies_change_no_bit(
    switches: dict[str, Any], streams: PumpedStreams, toy: Callable[..., Path], open_model: Open
) -> None:
    folder = toy("qwen3_moe")
    model = open_model(folder, "fifth", **BENCH, **switches)
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    model.offload.executor.table.check()
    counters = model.offload.stats()
    assert len(streams.enqueued) >= counters.loads > 0
    if switches.get("prefetch") == "look-ahead":
        assert counters.look_aheads > 0
    model.offload.executor.recover()  # a guess may still be on its way
    assert not model.offload._transfers._mover._host._leased


def test_computing_is_held_for_what_it_uses_only(
    streams: PumpedStreams, toy: Callable[..., Path], open_model: Open
) -> None:
    """One load at most for each hold: prefetches, wanted or not, that have landed meanwhile hold nobody."""
    model = open_model(toy("qwen3_moe"), "half", **BENCH, prefetch="look-ahead")
    held: list[Ticket] = []
    arrivals = model.offload.executor.arrivals
    arrive = arrivals._arrive

    def note(key: Any) -> Any:
        held.append(arrivals.tickets[key])
        return arrive(key)

    arrivals._arrive = note
    before = len(streams.held)
    oracle.greedy(model)
    assert model.offload.stats().prefetches > 0
    assert len(streams.held) - before <= len(held)


def test_a_batch_with_substitutes_beside_the_cpu(
    streams: PumpedStreams, toy: Callable[..., Path], open_model: Open
) -> None:
    model = open_model(toy("qwen3_moe"), "fifth", **BENCH, preset="smoe", alpha=0.9, max_sequences=3)
    ids = torch.cat([oracle.PROMPT, oracle.PROMPT.flip(1), oracle.PROMPT])
    model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    counters = model.offload.stats()
    assert counters.substituted > 0 and counters.host_computed + counters.loads > 0
    model.offload.executor.table.check()


class StillTransfers:
    """Tickets that the test moves by hand."""

    def __init__(self) -> None:
        self.tickets: dict[int, Ticket] = {}

    def submit(self, load: Load) -> Ticket:
        ticket = self.tickets[load.key[1]] = Ticket(load, None)
        ticket.state = TicketState.RUNNING
        return ticket

    def urge(self, ticket: Ticket) -> None:
        ticket.is_wanted = True

    def drain(self) -> None:
        pass


@pytest.fixture
def arrivals() -> Arrivals:
    slots = 4
    store = types.SimpleNamespace(
        placement=lambda *_: types.SimpleNamespace(layout=0, parts={}), keys=lambda: [(0, n) for n in range(9)]
    )
    return Arrivals(
        stores={EXACT: store},
        table=SlotTable(PoolSize(slots, 0)),
        eviction=LRU(),
        transfers=StillTransfers(),
        arena=None,
        math={(0, EXACT): types.SimpleNamespace(bind=lambda *_: object())},
        clock=lambda: 0.0,
    )


def start(arrivals: Arrivals, expert: int, reason: LoadReason = LoadReason.DEMAND) -> Ticket:
    arrivals.prefetch([Load((0, expert, EXACT), expert, None, True, reason, 0)])
    arrivals.counters = Counters()
    return arrivals.transfers.tickets[expert]


def plan_of(*experts: int) -> Any:
    return types.SimpleNamespace(serves=[Serve((0, expert, EXACT), (0,), True) for expert in experts])


def test_what_the_device_waits_for_is_still_under_way(arrivals: Arrivals) -> None:
    """For the balancer and for the draft, though the computing thread has gone on."""
    ticket, held = start(arrivals, 1), []
    assert arrivals.awaited(plan_of(1)) == [ticket] and arrivals.running == 0.5
    ticket.order(lambda: held.append(1))
    arrivals.weights_of(plan_of(1).serves[0])
    assert held == [1] and arrivals.counters == Counters()
    assert arrivals.running == 0.5, "the link is still busy with it"
    arrivals.weights_of(plan_of(1).serves[0])
    assert held == [1], "once"
    ticket.finish(TicketState.DONE)
    arrivals.collect()
    assert arrivals.running == 0


def test_what_has_landed_holds_nobody(arrivals: Arrivals) -> None:
    ticket, held = start(arrivals, 1, LoadReason.PREFETCH), []
    ticket.order(lambda: held.append(1))
    arrivals.collect()
    assert arrivals.tickets, "enqueued is not here"
    ticket.finish(TicketState.DONE)
    arrivals.collect()
    arrivals.weights_of(plan_of(1).serves[0])
    assert held == []


def test_a_copy_that_fails_after_the_device_was_held_is_forgotten(arrivals: Arrivals) -> None:
    ticket = start(arrivals, 1)
    ticket.order(lambda: None)
    arrivals.weights_of(plan_of(1).serves[0])
    ticket.finish(TicketState.FAILED, RuntimeError("injected: the device is lost"))
    with pytest.raises(RuntimeError, match="lost"):
        arrivals.collect()
    arrivals.recover()
    assert not arrivals.table.ready and arrivals.running == 0
    arrivals.table.check()
    arrivals.collect()
