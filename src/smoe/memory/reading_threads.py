"""Bringing experts in: reading threads, two queues, tickets.

Demand loads go before prefetches and upgrades, in the order of submission; one of those that is under way lets demand
loads pass between two chunks, so a demand load waits for one chunk (on a GPU for two, see `link.py`). A ticket is
waited for by the computing thread; an error of the reading thread surfaces there.

What a ticket says is true of the bytes, whatever carries them:

    submit         reading thread takes it    last chunk enqueued      bytes are there
      | QUEUED ......... | RUNNING .................. | ordered ............. | DONE, is_over, `ended`
      |                  | busy_seconds, `awaited`, the balancer's `running`: until here ^
    join, on a GPU                                    ^ returns: `hold` lets the device wait for the rest
    join, elsewhere                                                           ^ returns

Order on a GPU, from the point of view of one slot:

    compute stream   ... last kernel on the old expert | e0 ............... | wait e1, first kernel on the new one
    copy stream                                        | wait e0, chunk, chunk, e1 |

e0 is recorded when the load is submitted, e1 after its last chunk. The computing thread waits for neither; the device
waits for e1 only where an expert is used before it has come (`runtime/arrivals.py`). A slot that is given up while it
is still being filled (a wrong guess, at a prefill) may be loaded again at once: one stream does all copies, in order.
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
    """A ticket's life: queued, then running, then done or failed; or cancelled while queued."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4


class Ticket:
    """One load under way."""

    __slots__ = ("_done", "_is_open", "ended", "error", "free_event", "hold", "is_wanted", "load", "state")

    def __init__(self, load: Load, free_event: Any) -> None:
        self.load = load
        self.state = TicketState.QUEUED
        self.error: BaseException | None = None
        self.free_event = free_event
        self.hold: Callable[[], None] | None = None
        """Where the device can wait for the end of the load: have what it computes from now on do so."""
        self.is_wanted = False
        """Whether it is being waited for, so that nothing should go before it any more."""
        self.ended = 0.0
        """When the load was over, by the clock of the transfers."""
        self._is_open = False
        self._done = threading.Lock()
        self._done.acquire()

    @property
    def is_over(self) -> bool:
        return self.state in (TicketState.DONE, TicketState.FAILED, TicketState.CANCELLED)

    def join(self) -> None:
        """Block until the load is over, or nothing is left but for the device to wait: then `hold` is set.

        Whether it ended well is in `state` and `error`, once it is over.
        """
        self._done.acquire()
        self._done.release()

    def order(self, hold: Callable[[], None]) -> None:
        """All of the load is in the device's queue; by its reading thread, before `finish`."""
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
    """Carries one expert into its slot; called by reading threads."""

    def move(self, ticket: Ticket, between: Callable[[], None] | None) -> int:
        """Returns the bytes read from disk, when the expert is in its slot; may call `ticket.order` before that."""

    def mark_free(self) -> Any:
        """An event after which the slots given up so far may be overwritten (None on a CPU)."""

    def close(self) -> None: ...


class Transfers:
    """Reading threads in front of one mover.

    `submit`, `urge` and `cancel` belong to the computing thread and take no lock: deques change hands atomically, and a
    queue of tokens, one for each ticket, puts idle threads to sleep and wakes them.
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
        """Bytes read from disk, alignment included."""
        self.busy_seconds = 0.0
        """Time during which at least one load was running."""
        self._threads: list[threading.Thread] = []
        self._start(threads)

    def submit(self, load: Load) -> Ticket:
        """Queue a load; the slot must be free for overwriting on the compute side."""
        ticket = Ticket(load, self._mover.mark_free())
        (self._demand if load.reason is LoadReason.DEMAND else self._prefetch).append(ticket)
        self._tokens.put(True)
        return ticket

    def urge(self, ticket: Ticket) -> None:
        """A prefetch is being waited for: it goes before everything else, as far as it has not begun."""
        ticket.is_wanted = True
        if _withdraw(ticket, self._prefetch):
            self._demand.appendleft(ticket)
            self._tokens.put(True)

    def cancel(self, ticket: Ticket) -> bool:
        """Take a queued load back; False where it has started."""
        if not (_withdraw(ticket, self._prefetch) or _withdraw(ticket, self._demand)):
            return False
        ticket.finish(TicketState.CANCELLED)
        return True

    def reset(self) -> None:
        """Count from zero; nothing may be under way."""
        with self._clock:
            self.bytes_read, self.busy_seconds = 0, 0.0

    def drain(self) -> None:
        """Cancel what is queued and wait for what is running, also for tickets that an interrupt has lost."""
        threads = len(self._threads)
        self._stop()
        self._start(threads)

    def close(self) -> None:
        """Stop the threads; what is queued is cancelled, what is running is waited for."""
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
            with suppress(RuntimeError):  # an interrupt struck while it was being started: it ends by its token
                thread.join()

    def _work(self, tokens: SimpleQueue[bool]) -> None:
        _leave_pinned_core()
        while tokens.get():
            ticket = self._next()
            if ticket is not None:
                self._run(ticket)

    def _next(self) -> Ticket | None:
        """The most urgent ticket; None where another thread, or a cancellation, was faster."""
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
        except BaseException as caught:  # handed to the computing thread, which raises it
            error = caught
        with self._clock:
            self._running -= 1
            self.bytes_read += came
            if self._running == 0:
                self.busy_seconds += self._now() - self._busy_since
        ticket.ended = self._now()
        ticket.finish(TicketState.DONE if error is None else TicketState.FAILED, error)

    def _serve_demand(self) -> None:
        """Between two chunks of other loads: demand loads go first (their tokens are spent later, on nothing)."""
        while True:
            try:
                ticket = self._demand.popleft()
            except IndexError:
                return
            self._run(ticket)


def _withdraw(ticket: Ticket, queue: deque[Ticket]) -> bool:
    """Take a ticket out of a queue; False where it is not in it."""
    try:
        queue.remove(ticket)
    except ValueError:
        return False
    return True


def _leave_pinned_core() -> None:
    """Undo the pinning that OMP_PROC_BIND gave the main thread and that this thread has inherited."""
    if os.environ.get("OMP_PROC_BIND", "false").lower() not in ("false", "0") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
