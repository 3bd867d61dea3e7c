"""Load experts with reading threads, which take tickets from a queue of demand loads and a queue of other loads.

Demand loads precede prefetches and upgrades, in the order of submission. A running prefetch or upgrade lets demand
loads pass between two chunks, so a demand load waits for one chunk (on a GPU for two, see `link.py`). The computing
thread waits for tickets, and errors of the reading thread are raised there.

A ticket's state describes the bytes, whatever transfers them:

    submit         reading thread takes it    last chunk enqueued      bytes are there
    | QUEUED ......... | RUNNING .................. | ordered ............. | DONE, is_over, `ended`
    |                  | busy_seconds, `awaited`, the balancer's `running`: until here ^
    join, on a GPU                                    ^ returns: `hold` lets the device wait for the rest
    join, elsewhere                                                           ^ returns

The order of operations on one slot of a GPU:

    compute stream   ... last kernel on the old expert | e0 ............... | wait e1, first kernel on the new one
    copy stream                                        | wait e0, chunk, chunk, e1 |

e0 is recorded when the load is submitted, e1 after its last chunk. The computing thread waits for neither; the device
waits for e1 only if an expert is used before it has arrived (`runtime/arrivals.py`). A slot that is released while it
is being filled (after a wrong prediction or at a prefill) may be loaded again at once, because one stream does all
copies in order.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from queue import SimpleQueue
from typing import Any, Protocol

from smoe.policy.plan import Load, LoadReason


class TicketState(Enum):
    """The state of a ticket: queued, then running, then done or failed; or cancelled while queued."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4


class Ticket:
    """One requested load of an expert."""

    __slots__ = ("_done", "_is_open", "ended", "error", "free_event", "hold", "is_wanted", "load", "state")

    def __init__(self, load: Load, free_event: Any) -> None:
        self.load = load
        self.state = TicketState.QUEUED
        self.error: BaseException | None = None
        self.free_event = free_event
        self.hold: Callable[[], None] | None = None
        """Makes later work on the device wait for the end of the load; None unless the device can wait itself."""
        self.is_wanted = False
        """Whether the computing thread waits for the load, so that no other load should precede it."""
        self.ended = 0.0
        """The time when the load ended, by the clock of the transfers."""
        self._is_open = False
        self._done = threading.Lock()
        self._done.acquire()

    @property
    def is_over(self) -> bool:
        return self.state in (TicketState.DONE, TicketState.FAILED, TicketState.CANCELLED)

    def join(self) -> None:
        """Block until the load is over, or until only the device has to wait; then `hold` is set.

        When the load is over, `state` and `error` tell whether it succeeded.
        """
        self._done.acquire()
        self._done.release()

    def order(self, hold: Callable[[], None]) -> None:
        """Note that the whole load is in the device's queue; called by the reading thread before `finish`."""
        self.hold = hold
        self._open()

    def finish(self, state: TicketState, error: BaseException | None = None) -> None:
        self.error = error
        self.state = state
        if not self._is_open:
            self._open()

    def _open(self) -> None:
        self._is_open = True
        self._done.release()


class Mover(Protocol):
    """Moves one expert into its slot; called by reading threads."""

    def move(self, ticket: Ticket, between: Callable[[], None] | None) -> int:
        """Return the bytes read from disk when the expert is in its slot; may call `ticket.order` before."""

    def mark_free(self) -> Any:
        """Return an event after which slots released so far may be overwritten (None on a CPU)."""

    def close(self) -> None: ...


class Transfers:
    """Reading threads and their queues, in front of one mover.

    Only the computing thread calls `submit`, `urge` and `cancel`, which take no lock: deques are atomic, and a queue
    with one token per ticket wakes idle threads.
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
        """The time during which at least one load was running."""
        self._threads: list[threading.Thread] = []
        self._start(threads)

    def submit(self, load: Load) -> Ticket:
        """Queue a load and return its ticket; enqueued kernels may still use the slot's old expert."""
        ticket = Ticket(load, self._mover.mark_free())
        (self._demand if load.reason is LoadReason.DEMAND else self._prefetch).append(ticket)
        self._tokens.put(True)
        return ticket

    def urge(self, ticket: Ticket) -> None:
        """Move a prefetch that is waited for before all other loads, unless it has started."""
        ticket.is_wanted = True
        if _withdraw(ticket, self._prefetch):
            self._demand.appendleft(ticket)
            self._tokens.put(True)

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a queued load; return False if it has started."""
        if not (_withdraw(ticket, self._prefetch) or _withdraw(ticket, self._demand)):
            return False
        ticket.finish(TicketState.CANCELLED)
        return True

    def reset(self) -> None:
        """Reset the counters; no load may be running."""
        with self._clock:
            self.bytes_read, self.busy_seconds = 0, 0.0

    def drain(self) -> None:
        """Cancel queued loads and wait for running ones, including tickets lost by an interrupt."""
        threads = len(self._threads)
        self._stop()
        self._start(threads)

    def close(self) -> None:
        """Stop the threads: queued loads are cancelled, running ones are waited for."""
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
            with suppress(RuntimeError):  # an interrupt came while it was being started: its token ends it
                thread.join()

    def _work(self, tokens: SimpleQueue[bool]) -> None:
        _leave_pinned_core()
        while tokens.get():
            ticket = self._next()
            if ticket is not None:
                self._run(ticket)

    def _next(self) -> Ticket | None:
        """Return the most urgent ticket, or None if another thread took it or it was cancelled."""
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
            came = self._mover.move(ticket, between)
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
        """Run queued demand loads between two chunks of another load; their tokens later find no ticket."""
        while True:
            try:
                ticket = self._demand.popleft()
            except IndexError:
                return
            self._run(ticket)


def _withdraw(ticket: Ticket, queue: deque[Ticket]) -> bool:
    """Remove a ticket from a queue; return False if it is not in it."""
    try:
        queue.remove(ticket)
    except ValueError:
        return False
    return True


def _leave_pinned_core() -> None:
    """Undo the CPU pinning that this thread inherited from a main thread pinned by OMP_PROC_BIND."""
    if os.environ.get("OMP_PROC_BIND", "false").lower() not in ("false", "0") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
