"""From the host tier to the device, chunk by chunk, so that something more urgent waits for two chunks at most.

Two links: a copy stream of a GPU, and an emulated one (`emulation.py`). Both measure what a copy takes, and of both
`copy` returns when the bytes have reached the device, so a ticket is over when its expert is there, never before. What
differs is when the computing thread may go on. On a GPU the device itself can wait, so the ticket is *ordered* as soon
as the last chunk is enqueued; a demand load is enqueued whole and at once, a prefetch with no more than `OUTSTANDING`
chunks in the queue:

    reading thread   | chunk 1, chunk 2 | wait for 1 | chunk 3 | order | wait for 2, 3 | over
    copy stream           | chunk 1 ........ | chunk 2 ........ | chunk 3 ........ |
    demand, elsewhere                 ^ submitted here: enqueued behind chunk 2, and chunk 3 behind it
    computing thread                                   join returns ^  hold, launch ...
    compute stream                                                     waits for the end of 3 | kernels

An emulated copy is never ordered ahead of its end: `join` returns when it is over.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import torch

from smoe.memory.disk import CHUNK_BYTES
from smoe.memory.emulation import Emulation
from smoe.memory.reading_threads import Ticket
from smoe.memory.streams import Event, Streams

OUTSTANDING = 2
"""Chunks of a prefetch in the device's queue: one that is being copied, and one so that the link never idles."""

_Between = Callable[[], None] | None


class Link(Protocol):
    """Carries one expert's bytes; called by the reading threads, several at a time."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, ticket: Ticket, between: _Between) -> None:
        """Copy all of `source` (uint8 [n]) once the ticket's `free_event` has come, and return when it is copied.

        Calls `between` between two chunks, and `ticket.order` where the device can wait for the rest by itself.
        """

    def mark_free(self) -> Any:
        """An event after which slots given up so far may be overwritten; None where that is now."""

    def measured(self) -> Iterator[tuple[float, int]]:
        """(seconds, bytes) of every copy that has ended since the last call, without what it waited for others."""

    def close(self) -> None: ...


class CudaLink:
    """A stream in addition to the computing one. Reading threads wait for their copies, the computing thread never
    does."""

    def __init__(self, streams: Streams, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._streams = streams
        self._chunk_bytes = chunk_bytes
        self._enqueuing = threading.Lock()
        self._timed: deque[tuple[float, int]] = deque(maxlen=64)

    def copy(self, source: torch.Tensor, target: torch.Tensor, ticket: Ticket, between: _Between) -> None:
        flying: deque[tuple[Event, Event]] = deque()
        seconds, begin, nbytes = 0.0, 0, source.numel()
        try:
            while begin < nbytes:
                if begin and between is not None and not ticket.is_wanted:
                    if len(flying) == OUTSTANDING:
                        seconds += _settle(flying.popleft())
                    between()
                end = nbytes if between is None or ticket.is_wanted else min(begin + self._chunk_bytes, nbytes)
                free_event = ticket.free_event if begin == 0 else None
                flying.append(self._enqueue(source[begin:end], target[begin:end], free_event))
                begin = end
            _, ended = flying[-1]
            ticket.order(lambda: self._streams.hold_computing(ended))
            while flying:
                seconds += _settle(flying.popleft())
        except BaseException:
            for _, ended in flying:  # the two buffers may be reused only after the device has finished with them
                with suppress(Exception):
                    ended.synchronize()
            raise
        self._timed.append((seconds, nbytes))

    def _enqueue(self, source: torch.Tensor, target: torch.Tensor, free_event: Any) -> tuple[Event, Event]:
        """A copy and its two marks, with nothing of another thread's between them."""
        with self._enqueuing:
            if free_event is not None:
                self._streams.hold_copying(free_event)
            return self._streams.copy(source, target)

    def mark_free(self) -> Any:
        return self._streams.mark_computing()

    def measured(self) -> Iterator[tuple[float, int]]:
        while self._timed:
            yield self._timed.popleft()

    def close(self) -> None:
        self._streams.finish_copying()


def _settle(marks: tuple[Event, Event]) -> float:
    """Wait for one chunk: the seconds that the device took for it."""
    began, ended = marks
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


class EmulatedLink:
    """Copies in RAM at a profile's pace, one chunk at a time whatever the number of threads."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._one_at_a_time = threading.Lock()
        self._timed: deque[tuple[float, int]] = deque(maxlen=64)

    def copy(self, source: torch.Tensor, target: torch.Tensor, ticket: Ticket | None, between: _Between) -> None:
        total, size = 0.0, math.ceil(CHUNK_BYTES / self._emulation.scale)
        for begin in range(0, source.numel(), size):
            if begin and between is not None:
                between()
            end = min(begin + size, source.numel())
            with self._one_at_a_time:
                began = time.perf_counter()
                with self._emulation.carrying(end - begin, begin == 0):
                    target[begin:end].copy_(source[begin:end])
                total += time.perf_counter() - began
        self._timed.append((total / self._emulation.dilation, source.numel()))

    def mark_free(self) -> Any:
        return None

    def measured(self) -> Iterator[tuple[float, int]]:
        while self._timed:
            yield self._timed.popleft()

    def close(self) -> None:
        pass
