"""The link to a GPU, on queues whose clock stands still until the test moves it.

Would catch: a ticket that is over when its copy is only enqueued, a demand load behind every chunk of a prefetch, a
slot overwritten before the kernel that reads it, one copy's time booked for another.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from smoe.expert import EXACT
from smoe.memory.expert_files import CHUNK_BYTES
from smoe.memory.link import OUTSTANDING, CudaLink
from smoe.memory.reading_threads import Ticket, TicketState, Transfers
from smoe.policy.plan import Load, LoadReason
from tests.memory.fake_streams import ArenaMover, FakeStreams

CHUNKS = 4
NBYTES = CHUNKS * CHUNK_BYTES
MS_PER_CHUNK = 1.0


@pytest.fixture
def streams() -> FakeStreams:
    return FakeStreams(CHUNK_BYTES / MS_PER_CHUNK)


@pytest.fixture
def link(streams: FakeStreams) -> CudaLink:
    return CudaLink(streams)


@pytest.fixture
def mover(link: CudaLink) -> ArenaMover:
    sources = torch.arange(1, 5, dtype=torch.uint8).unsqueeze(1).expand(4, NBYTES).contiguous()
    return ArenaMover(link, sources, torch.zeros(4, NBYTES, dtype=torch.uint8))


def open_transfers(mover: ArenaMover, streams: FakeStreams, threads: int) -> Iterator[Transfers]:
    clock = itertools.count().__next__
    each = Transfers(mover, threads, lambda: float(clock()))
    yield each
    streams.finish_computing()
    closing = threading.Thread(target=each.close)
    closing.start()
    for _ in range(2000):
        streams.advance(10 * MS_PER_CHUNK)
        closing.join(0.005)
        if not closing.is_alive():
            return
    raise AssertionError("a reading thread does not end")


@pytest.fixture
def transfers(mover: ArenaMover, streams: FakeStreams) -> Iterator[Transfers]:
    yield from open_transfers(mover, streams, 1)


@pytest.fixture
def two_readers(mover: ArenaMover, streams: FakeStreams) -> Iterator[Transfers]:
    yield from open_transfers(mover, streams, 2)


def load(expert: int, reason: LoadReason = LoadReason.DEMAND, slot: int | None = None) -> Load:
    return Load((0, expert, EXACT), expert if slot is None else slot, None, True, reason, 0)


def prefetch(expert: int) -> Load:
    return load(expert, LoadReason.PREFETCH)


def wait_over(streams: FakeStreams, *tickets: Ticket) -> None:
    """The clock is where it has to be; the reading thread needs a moment of real time to see it."""
    for _ in range(1000):
        if all(ticket.is_over for ticket in tickets):
            return
        with streams.moved:
            streams.moved.wait(0.005)
    raise AssertionError([ticket.state for ticket in tickets])


def test_a_ticket_is_over_when_its_bytes_are_there(
    streams: FakeStreams, mover: ArenaMover, transfers: Transfers
) -> None:
    ticket = transfers.submit(load(0))
    ticket.join()
    assert ticket.state is TicketState.RUNNING and not ticket.is_over, "enqueued is not copied"
    streams.advance(MS_PER_CHUNK * (CHUNKS - 0.5))
    assert not ticket.is_over and not mover.slots[0].any()
    streams.advance(MS_PER_CHUNK)
    wait_over(streams, ticket)
    assert ticket.state is TicketState.DONE and ticket.ended > 0
    assert torch.equal(mover.slots[0], mover.sources[0])


def test_the_host_goes_on_and_the_device_waits(streams: FakeStreams, transfers: Transfers) -> None:
    """`join` returns once all is enqueued, at a standing clock, with what holds the computing queue."""
    ticket = transfers.submit(load(0))
    ticket.join()
    assert ticket.hold is not None and streams.held == []
    ticket.hold()
    (event,) = streams.held
    assert not event.query()
    streams.advance(MS_PER_CHUNK * CHUNKS)
    assert event.at == MS_PER_CHUNK * CHUNKS


def test_a_prefetch_has_few_chunks_in_the_queue(streams: FakeStreams, transfers: Transfers) -> None:
    guess = transfers.submit(prefetch(1))
    streams.wait_enqueued(OUTSTANDING)
    for done in range(1, CHUNKS - OUTSTANDING + 1):
        assert streams.outstanding == OUTSTANDING
        assert guess.state is TicketState.RUNNING and guess.hold is None
        streams.advance(MS_PER_CHUNK)
        streams.wait_enqueued(OUTSTANDING + done)
    guess.join()
    assert not guess.is_over


@pytest.mark.parametrize("readers", ["transfers", "two_readers"])
def test_a_demand_load_waits_for_the_chunks_in_the_queue_only(
    readers: str, streams: FakeStreams, mover: ArenaMover, request: pytest.FixtureRequest
) -> None:
    transfers: Transfers = request.getfixturevalue(readers)
    guess = transfers.submit(prefetch(1))
    streams.wait_enqueued(OUTSTANDING)
    wanted = transfers.submit(load(2))
    if readers == "transfers":
        streams.advance(MS_PER_CHUNK)  # the only reading thread looks up when a chunk has ended
    streams.wait_enqueued(OUTSTANDING + 1)
    assert streams.enqueued == [CHUNK_BYTES] * OUTSTANDING + [NBYTES], "whole, and before the prefetch's other chunks"
    streams.advance(MS_PER_CHUNK * (OUTSTANDING + CHUNKS) - streams.now)
    wait_over(streams, wanted)
    assert torch.equal(mover.slots[2], mover.sources[2])
    assert not guess.is_over


def test_a_queued_prefetch_can_still_be_taken_back(streams: FakeStreams, transfers: Transfers) -> None:
    first, second = transfers.submit(prefetch(1)), transfers.submit(prefetch(2))
    streams.wait_enqueued(OUTSTANDING)
    assert transfers.cancel(second) and not transfers.cancel(first)
    for _ in range(CHUNKS):
        streams.advance(MS_PER_CHUNK)
    wait_over_pumping(streams, first)
    assert sum(streams.enqueued) == NBYTES, "nothing of the second was copied"


def wait_over_pumping(streams: FakeStreams, *tickets: Ticket) -> None:
    for _ in range(1000):
        if all(ticket.is_over for ticket in tickets):
            return
        streams.advance(MS_PER_CHUNK)
        with streams.moved:
            streams.moved.wait(0.002)
    raise AssertionError([ticket.state for ticket in tickets])


def test_a_prefetch_that_is_waited_for_is_enqueued_whole(streams: FakeStreams, transfers: Transfers) -> None:
    guess = transfers.submit(prefetch(1))
    streams.wait_enqueued(OUTSTANDING)
    transfers.urge(guess)
    streams.advance(MS_PER_CHUNK)
    streams.wait_enqueued(OUTSTANDING + 1)
    guess.join()
    assert streams.enqueued[-1] > CHUNK_BYTES or CHUNKS == OUTSTANDING + 1
    assert sum(streams.enqueued) == NBYTES and not guess.is_over


def test_a_slot_is_not_overwritten_before_it_has_been_read(
    streams: FakeStreams, mover: ArenaMover, transfers: Transfers
) -> None:
    """The copy waits for what was computing when it was submitted (e0)."""
    streams.is_computing = True
    mover.slots[0] = 77
    ticket = transfers.submit(load(0))
    ticket.join()
    streams.advance(MS_PER_CHUNK * CHUNKS * 10)
    assert bool((mover.slots[0] == 77).all())
    streams.finish_computing()
    wait_over_pumping(streams, ticket)
    assert torch.equal(mover.slots[0], mover.sources[0])


def test_a_slot_given_up_under_way_ends_with_the_later_load(
    streams: FakeStreams, mover: ArenaMover, two_readers: Transfers
) -> None:
    """A wrong guess whose slot is loaded anew while the guess is still being copied: one stream keeps the order."""
    guess = two_readers.submit(load(1, slot=0))
    guess.join()
    later = two_readers.submit(load(2, slot=0))
    later.join()
    assert not guess.is_over
    wait_over_pumping(streams, guess, later)
    assert torch.equal(mover.slots[0], mover.sources[2])


def test_a_copy_s_time_is_its_own(streams: FakeStreams, link: CudaLink, two_readers: Transfers) -> None:
    """Two reading threads share the stream; neither the other's chunks nor the wait for computing count."""
    streams.is_computing = True
    first = two_readers.submit(prefetch(1))
    second = two_readers.submit(prefetch(2))
    streams.wait_enqueued(2 * OUTSTANDING)
    streams.advance(50.0)
    streams.finish_computing()
    wait_over_pumping(streams, first, second)
    measured = list(link.measured())
    assert [seconds for seconds, _ in measured] == [pytest.approx(CHUNKS * MS_PER_CHUNK / 1e3)] * 2
    assert len({nbytes for _, nbytes in measured}) == 1 and measured[0][1] > 0
    assert list(link.measured()) == []


def test_a_device_that_fails_after_the_order_is_an_error(streams: FakeStreams, transfers: Transfers) -> None:
    ticket = transfers.submit(load(0))
    ticket.join()
    streams.failure = RuntimeError("injected: the device is lost")
    streams.advance(MS_PER_CHUNK * CHUNKS)
    wait_over(streams, ticket)
    assert ticket.state is TicketState.FAILED and "lost" in str(ticket.error)
    streams.failure = None
