"""Queues and tickets, on a mover that the test holds by the hand: order is asserted on what was recorded, never on
time.

Would catch: a prefetch that a demand load has to wait for, a cancelled load that still arrives, an error that nobody
hears of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smoe.errors import TransferError
from smoe.expert import EXACT
from smoe.memory.reading_threads import Ticket, TicketState, Transfers
from smoe.policy.plan import Load, LoadReason

PATIENCE_SECONDS = 10


class HeldMover:
    """Every move waits for `release`; a prefetch has as many chunks as `chunks` says and asks between them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.held = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.chunks = 1
        self.fail: set[int] = set()
        self.closed = 0

    def move(self, ticket: Ticket, between: Callable[[], None] | None) -> int:
        expert = ticket.load.key[1]
        self.events.append(f"begin {expert}")
        self.started.release()
        assert self.held.acquire(timeout=PATIENCE_SECONDS)
        for _ in range(self.chunks - 1):
            if between is not None:
                between()
        if expert in self.fail:
            raise TransferError(5, f"expert {expert} is unreadable")
        self.events.append(f"end {expert}")
        return 100 + expert

    def mark_free(self) -> Any:
        return None

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def mover() -> HeldMover:
    return HeldMover()


@pytest.fixture
def transfers(mover: HeldMover) -> Iterator[Transfers]:
    each = Transfers(mover, threads=1)
    yield each
    mover.held.release(100)
    each.close()


def load(expert: int, reason: LoadReason = LoadReason.DEMAND) -> Load:
    return Load((0, expert, EXACT), expert, None, True, reason, 0)


unasked = pytest.mark.parametrize("reason", [LoadReason.PREFETCH, LoadReason.UPGRADE])
"""What is brought in though nobody waits for it."""


def prefetch(expert: int) -> Load:
    return load(expert, LoadReason.PREFETCH)


def wait_started(mover: HeldMover) -> None:
    assert mover.started.acquire(timeout=PATIENCE_SECONDS)


def order(mover: HeldMover) -> list[int]:
    return [int(event.split()[1]) for event in mover.events if event.startswith("begin")]


def finish(mover: HeldMover, *tickets: Ticket) -> None:
    mover.held.release(100)
    for ticket in tickets:
        ticket.join()


@unasked
def test_demand_goes_first_in_order_of_submission(reason: LoadReason, mover: HeldMover, transfers: Transfers) -> None:
    tickets = [transfers.submit(load(0))]
    wait_started(mover)
    tickets += [transfers.submit(each) for each in (load(1, reason), load(2, reason), load(3), load(4))]
    finish(mover, *tickets)
    assert order(mover) == [0, 3, 4, 1, 2]
    assert all(ticket.state is TicketState.DONE and ticket.is_over for ticket in tickets)
    assert transfers.bytes_read == 5 * 100 + 10
    assert transfers.busy_seconds > 0


@unasked
def test_what_nobody_waits_for_lets_demand_loads_pass(
    reason: LoadReason, mover: HeldMover, transfers: Transfers
) -> None:
    """Between two of its chunks: would catch an upgrade that a layer has to wait for."""
    mover.chunks = 3
    first = transfers.submit(load(1, reason))
    wait_started(mover)
    second = transfers.submit(load(2))
    third = transfers.submit(load(3))
    finish(mover, first, second, third)
    assert mover.events == ["begin 1", "begin 2", "end 2", "begin 3", "end 3", "end 1"]


@unasked
def test_what_is_urged_goes_before_its_like(reason: LoadReason, mover: HeldMover, transfers: Transfers) -> None:
    tickets = [transfers.submit(load(0))]
    wait_started(mover)
    tickets += [transfers.submit(load(expert, reason)) for expert in (1, 2, 3)]
    transfers.urge(tickets[3])
    finish(mover, *tickets)
    assert order(mover) == [0, 3, 1, 2]


def test_urging_a_demand_load_changes_no_order(mover: HeldMover, transfers: Transfers) -> None:
    """The computing thread urges whatever it waits for; a queued demand load must not go to the end for that."""
    tickets = [transfers.submit(load(0))]
    wait_started(mover)
    tickets += [transfers.submit(load(expert)) for expert in (1, 2, 3)]
    for ticket in tickets:
        transfers.urge(ticket)
    finish(mover, *tickets)
    assert order(mover) == [0, 1, 2, 3]


@pytest.mark.parametrize("reason", list(LoadReason))
def test_cancelled_loads_never_begin(reason: LoadReason, mover: HeldMover, transfers: Transfers) -> None:
    running = transfers.submit(load(0))
    wait_started(mover)
    queued, last = transfers.submit(load(1, reason)), transfers.submit(load(2))
    assert transfers.cancel(queued)
    assert queued.state is TicketState.CANCELLED
    queued.join()
    assert not transfers.cancel(queued), "cancelled twice"
    assert not transfers.cancel(running), "what runs cannot be taken back"
    finish(mover, running, last)
    assert order(mover) == [0, 2]
    assert not transfers.cancel(last)


def test_an_error_is_the_waiting_thread_s(mover: HeldMover, transfers: Transfers) -> None:
    """And the reading thread lives on."""
    mover.fail = {1}
    failing, fine = transfers.submit(load(1)), transfers.submit(load(2))
    finish(mover, failing, fine)
    assert failing.state is TicketState.FAILED and isinstance(failing.error, TransferError)
    assert fine.state is TicketState.DONE and fine.error is None
    assert transfers.bytes_read == 102


def test_a_demand_load_that_fails_inside_a_prefetch_is_not_the_prefetch_s_error(
    mover: HeldMover, transfers: Transfers
) -> None:
    mover.chunks, mover.fail = 2, {2}
    guess = transfers.submit(prefetch(1))
    wait_started(mover)
    wanted = transfers.submit(load(2))
    finish(mover, guess, wanted)
    assert (guess.state, wanted.state) == (TicketState.DONE, TicketState.FAILED)


def test_close_waits_for_what_runs_and_cancels_the_rest(mover: HeldMover) -> None:
    transfers = Transfers(mover, threads=2)
    tickets = [transfers.submit(load(expert)) for expert in range(5)]
    wait_started(mover)
    wait_started(mover)
    closing = threading.Thread(target=transfers.close)
    closing.start()
    tickets[4].join()
    mover.held.release(2)
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()
    assert [ticket.state for ticket in tickets] == [TicketState.DONE] * 2 + [TicketState.CANCELLED] * 3
    assert not [thread for thread in threading.enumerate() if thread in transfers._threads]
    assert mover.closed == 1


def test_drain_waits_for_what_runs_and_goes_on(mover: HeldMover, transfers: Transfers) -> None:
    """As after an interrupt: afterwards nobody writes to any slot, and new loads work."""
    running, queued = transfers.submit(load(0)), transfers.submit(load(1))
    wait_started(mover)
    mover.held.release(1)
    transfers.drain()
    assert (running.state, queued.state) == (TicketState.DONE, TicketState.CANCELLED)
    again = transfers.submit(load(2))
    finish(mover, again)
    assert again.state is TicketState.DONE
    assert order(mover) == [0, 2]


def test_many_threads_lose_nothing() -> None:
    """Every ticket ends exactly once, whoever runs it."""
    mover = HeldMover()
    mover.held.release(10**6)
    mover.chunks = 2
    transfers = Transfers(mover, threads=4)
    tickets = [transfers.submit(load(n, LoadReason.PREFETCH if n % 3 else LoadReason.DEMAND)) for n in range(400)]
    for ticket in tickets[::2]:
        transfers.urge(ticket)
    for ticket in tickets:
        ticket.join()
    transfers.close()
    assert all(ticket.state is TicketState.DONE for ticket in tickets)
    assert sorted(order(mover)) == list(range(400))
    assert transfers.bytes_read == sum(100 + n for n in range(400))


def test_an_interrupt_while_threads_are_started_does_not_keep_it_from_closing(
    mover: HeldMover, transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may strike inside `Thread.start`: what closes then must not end in another error."""

    def struck(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", struck)
        with pytest.raises(KeyboardInterrupt):
            transfers.drain()
    transfers.close()
