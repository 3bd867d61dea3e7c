"""Loads experts with reading threads. They take tickets (requested loads) from two queues: one of demand loads, one of
other loads.

Demand loads go before prefetches and upgrades; within a queue the order is that of submission. A running prefetch or
upgrade executes waiting demand loads between two chunks, so a demand load waits for one chunk (on a GPU for two, see
`link.py`). The computing thread waits for tickets, and errors of a reading thread are raised there.

A ticket's state describes the bytes, whatever transfers them. The states, with what each method waits for:

    submitted        a reading thread takes it    last chunk enqueued     bytes are there
    | QUEUED ....... | RUNNING .................. | ordered ............. | DONE, `is_over`, `ended`
                     | counted as running: until here ................... ^
    `join`, on a GPU                              ^ returns: `hold` lets the device wait for the bytes
    `join`, elsewhere                                                     ^ returns

On a GPU, two events order the operations on one slot: e0 is recorded when the load is submitted, e1 after its last
chunk:

    compute stream   ... last kernel on the old expert | e0 ............... | wait e1, first kernel on the new one
    copy stream                                        | wait e0, chunk, chunk, e1 |

The computing thread waits for neither event. The device waits for e1 only if an expert is used before it has arrived
(`runtime/arrivals.py`). If a slot is released while an expert is being read into it (after a wrong prediction, or at a
prefill), another load into it may be submitted at once, because one stream does all copies in order.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from queue import SimpleQueue
from typing import Any, Protocol

from smoe.policy.plan import Load, LoadReason


class TicketState(Enum):
    """The state of a ticket: queued, then running, then done or failed. A queued ticket may also be cancelled."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4


class Ticket:
    """One requested load of an expert, and whether it is done."""

    __slots__ = ("_done", "_is_open", "ended", "error", "free_event", "hold", "is_wanted", "load", "state")

    def __init__(self, load: Load, free_event: Any) -> None:
        self.load = load
        self.state = TicketState.QUEUED
        self.error: BaseException | None = None
        self.free_event = free_event
        self.hold: Callable[[], None] | None = None
        """A function that makes later work on the device wait for the end of the load; None if the device cannot wait
        by itself."""
        self.is_wanted = False
        """Whether the computing thread waits for this load, so that no other load should go first."""
        self.ended = 0.0
        """The time at which the load ended, on the clock of the transfers."""
        self._is_open = False
        self._done = threading.Lock()
        self._done.acquire()

    @property
    def is_over(self) -> bool:
        """Whether the load is done, has failed or was cancelled."""
        return self.state in (TicketState.DONE, TicketState.FAILED, TicketState.CANCELLED)

    def join(self) -> None:
        """Block until the load is over, or until only the device has to wait for it; `hold` is set in the second case.

        When the load is over, `state` and `error` show whether it succeeded.
        """
        self._done.acquire()
        self._done.release()

    def order(self, hold: Callable[[], None]) -> None:
        """Record that all chunks of the load are in the device's queue. The reading thread calls this before
        `finish`."""
        self.hold = hold
        self._open()

    def finish(self, state: TicketState, error: BaseException | None = None) -> None:
        """Record the final state of the load, and wake threads that wait for it."""
        self.error = error
        self.state = state
        if not self._is_open:
            self._open()

    def _open(self) -> None:
        self._is_open = True
        self._done.release()


class Mover(Protocol):
    """Moves one expert into its slot. Reading threads call its methods."""

    def move(self, ticket: Ticket, between: Callable[[], None] | None) -> int:
        """Move the expert of a ticket into its slot, and return the number of bytes read from disk. May call
        `ticket.order` before the move is complete. Calls `between` between two chunks."""

    def mark_free(self) -> Any:
        """Return an event after which the slots released until now may be overwritten (None on a CPU)."""

    def close(self) -> None: ...


class Transfers:
    """The reading threads and the two queues of loads that they execute.

    Only the computing thread calls `submit`, `urge` and `cancel`. These methods take no lock, because deques are
    atomic. Idle threads wait at a third queue, which gets one entry per ticket.
    """

    def __init__(self, mover: Mover, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._mover = mover
        self._now = clock
        self._demand: deque[Ticket] = deque()
        self._prefetch: deque[Ticket] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._clock = threading.Lock()
        self._running = 0
        self._busy_since = 0.0
        self.bytes_read = 0
        """The number of bytes read from disk, alignment included."""
        self.busy_seconds = 0.0
        """The total time, in seconds, during which at least one load was running."""
        self._skips_reads = False
        """Whether loads end at once and leave their slots as they are."""
        self._threads: list[threading.Thread] = []
        self._start(threads)

    @contextmanager
    def without_reads(self) -> Iterator[None]:
        """Make loads end at once and leave their slots as they are during the `with` block. No load may be queued when
        it begins or ends."""
        self._skips_reads = True
        try:
            yield
        finally:
            self._skips_reads = False

    def submit(self, load: Load) -> Ticket:
        """Queue a load and return its ticket. Kernels that are already enqueued may still use the expert that is in the
        slot."""
        ticket = Ticket(load, self._mover.mark_free())
        (self._demand if load.reason is LoadReason.DEMAND else self._prefetch).append(ticket)
        self._tokens.put(True)
        return ticket

    def urge(self, ticket: Ticket) -> None:
        """Move the ticket of a prefetch to the front of the queue of demand loads, because the computing thread waits
        for it. Do nothing if it has started."""
        ticket.is_wanted = True
        if _withdraw(ticket, self._prefetch):
            self._demand.appendleft(ticket)
            self._tokens.put(True)

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a queued load. Return False if the load has started."""
        if not (_withdraw(ticket, self._prefetch) or _withdraw(ticket, self._demand)):
            return False
        ticket.finish(TicketState.CANCELLED)
        return True

    def reset(self) -> None:
        """Reset the counters of bytes and time; no load may be running."""
        with self._clock:
            self.bytes_read, self.busy_seconds = 0, 0.0

    def drain(self) -> None:
        """Cancel queued loads and wait for running ones. Also resets tickets that an interrupt has lost."""
        threads = len(self._threads)
        self._stop()
        self._start(threads)

    def close(self) -> None:
        """Stop the threads: cancel queued loads and wait for running ones."""
        self._stop()
        self._mover.close()

    def _start(self, threads: int) -> None:
        self._tokens = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(self._tokens,), name=f"smoe-read-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _stop(self) -> None:
        while (ticket := self._next()) is not None:
            ticket.finish(TicketState.CANCELLED)
        for _ in self._threads:
            self._tokens.put(False)
        for thread in self._threads:
            with suppress(RuntimeError):  # an interrupt came while the thread was being started; its token ends it
                thread.join()

    def _work(self, tokens: SimpleQueue[bool]) -> None:
        _leave_pinned_core()
        while tokens.get():
            ticket = self._next()
            if ticket is not None:
                self._run(ticket)

    def _next(self) -> Ticket | None:
        """Return the most urgent ticket. Return None if both queues are empty, because another thread took the ticket
        or the ticket was cancelled."""
        for queue in (self._demand, self._prefetch):
            with suppress(IndexError):
                return queue.popleft()
        return None

    def _run(self, ticket: Ticket) -> None:
        ticket.state = TicketState.RUNNING
        between = None if ticket.load.reason is LoadReason.DEMAND else self._serve_demand
        with self._clock:
            if self._running == 0:
                self._busy_since = self._now()
            self._running += 1
        came, error = 0, None
        try:
            came = 0 if self._skips_reads else self._mover.move(ticket, between)
        except BaseException as caught:  # passed to the computing thread, which raises it
            error = caught
        with self._clock:
            self._running -= 1
            self.bytes_read += came
            if self._running == 0:
                self.busy_seconds += self._now() - self._busy_since
        ticket.ended = self._now()
        ticket.finish(TicketState.DONE if error is None else TicketState.FAILED, error)

    def _serve_demand(self) -> None:
        """Execute all queued demand loads, between two chunks of another load. A thread that wakes up later for one of
        these loads finds no ticket."""
        while True:
            try:
                ticket = self._demand.popleft()
            except IndexError:
                return
            self._run(ticket)


def _withdraw(ticket: Ticket, queue: deque[Ticket]) -> bool:
    """Remove a ticket from a queue. Return False if the queue does not contain it."""
    try:
        queue.remove(ticket)
    except ValueError:
        return False
    return True


def _leave_pinned_core() -> None:
    """Allow this thread to run on all cores. It may have inherited a restriction to one core from a thread that the
    setting OMP_PROC_BIND has pinned."""
    if os.environ.get("OMP_PROC_BIND", "false").lower() not in ("false", "0") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
