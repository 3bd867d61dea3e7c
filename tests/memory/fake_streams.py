"""A device's two queues with a clock that only the test moves: copies are enqueued at once and happen later, in order.

A copy writes its target when it ends and not before, so whoever computes too early computes with something else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smoe.memory.link import Link
from smoe.memory.reading_threads import Ticket

PATIENCE_SECONDS = 20


class FakeEvent:
    """A mark of a fake queue."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        self.at: float | None = None
        """Virtual milliseconds at which it came."""

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        with self._streams.moved:
            assert self._streams.moved.wait_for(self.query, PATIENCE_SECONDS), "nobody moves the clock"
        if self._streams.failure is not None:
            raise self._streams.failure

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.at is not None and end_event.at is not None
        return end_event.at - self.at


@dataclass
class _Copy:
    source: torch.Tensor
    target: torch.Tensor
    before: FakeEvent
    after: FakeEvent
    enqueued_at: float


class FakeStreams:
    """`bytes_per_ms` of virtual time; the computing queue is idle unless `is_computing`."""

    def __init__(self, bytes_per_ms: float) -> None:
        self.moved = threading.Condition()
        self.now = 0.0
        self.is_computing = False
        """Marks in the computing queue come when it is set back by `finish_computing`."""
        self.held: list[FakeEvent] = []
        """What computing was made to wait for, in order."""
        self.enqueued: list[int] = []
        """Sizes of all copies, in the order of the queue."""
        self.failure: Exception | None = None
        """Where set, what every wait raises from now on: the device is lost."""
        self._rate = bytes_per_ms
        self._copied_until = 0.0
        self._queue: deque[_Copy | FakeEvent] = deque()
        self._unreached: list[FakeEvent] = []

    @property
    def outstanding(self) -> int:
        """Copies that are enqueued and have not ended."""
        return sum(isinstance(entry, _Copy) for entry in self._queue)

    def wait_enqueued(self, copies: int) -> None:
        """Until the reading threads have enqueued so many copies in all."""
        with self.moved:
            assert self.moved.wait_for(lambda: len(self.enqueued) >= copies, PATIENCE_SECONDS), self.enqueued

    def mark_computing(self) -> FakeEvent:
        event = FakeEvent(self)
        if self.is_computing:
            self._unreached.append(event)
        else:
            event.at = self.now
        return event

    def finish_computing(self) -> None:
        self.is_computing = False
        with self.moved:
            for event in self._unreached:
                event.at = self.now
            self._unreached.clear()
            self.moved.notify_all()

    def hold_computing(self, event: Any) -> None:
        self.held.append(event)

    def hold_copying(self, event: Any) -> None:
        with self.moved:
            self._queue.append(event)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> tuple[FakeEvent, FakeEvent]:
        entry = _Copy(source, target, FakeEvent(self), FakeEvent(self), self.now)
        with self.moved:
            self._queue.append(entry)
            self.enqueued.append(source.numel())
            self.moved.notify_all()
        return entry.before, entry.after

    def finish_copying(self) -> None:
        assert not self.outstanding

    def advance(self, milliseconds: float) -> None:
        """Let the device work for so long."""
        with self.moved:
            until = self.now + milliseconds
            while self._queue:
                entry = self._queue[0]
                if isinstance(entry, FakeEvent):
                    if entry.at is None:
                        break  # computing has not come so far
                    self._copied_until = max(self._copied_until, entry.at)
                else:
                    began = max(self._copied_until, entry.enqueued_at)
                    ended = began + entry.source.numel() / self._rate
                    if ended > until:
                        break
                    entry.target.copy_(entry.source)
                    entry.before.at, entry.after.at = began, ended
                    self._copied_until = ended
                self._queue.popleft()
            self.now = until
            self.moved.notify_all()


class PumpedStreams(FakeStreams):
    """The same beside computing on this CPU, which is no queue: a thread moves the clock, and computing that is held
    really waits."""

    def __init__(self, bytes_per_ms: float, step_ms: float = 1.0) -> None:
        super().__init__(bytes_per_ms)
        self._step_ms = step_ms
        self._is_over = threading.Event()
        self._pump = threading.Thread(target=self._run, daemon=True)
        self._pump.start()

    def hold_computing(self, event: Any) -> None:
        super().hold_computing(event)
        event.synchronize()

    def finish_copying(self) -> None:
        self._is_over.set()
        self._pump.join()
        super().finish_copying()

    def _run(self) -> None:
        while not self._is_over.wait(0.0002):
            self.advance(self._step_ms)


class ArenaMover:
    """Host experts to slots over a link, as `HostMover` does, without a disk: expert n is the row n of `sources`."""

    def __init__(self, link: Link, sources: torch.Tensor, slots: torch.Tensor) -> None:
        self._link = link
        self.sources = sources
        self.slots = slots

    def move(self, ticket: Ticket, between: Callable[[], None] | None) -> int:
        self._link.copy(self.sources[ticket.load.key[1]], self.slots[ticket.load.slot], ticket, between)
        return 0

    def mark_free(self) -> Any:
        return self._link.mark_free()

    def close(self) -> None:
        self._link.close()
