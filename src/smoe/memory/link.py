"""Copies experts from the host tier to the device in chunks, so that a more urgent copy waits for at most two chunks.

There are two kinds of link: a copy stream of a GPU, and an emulated one (`emulation.py`). Both measure the time of
copies. Their `copy` returns when all bytes have reached the device, so the ticket of a load is over when its expert is
there. They differ in when the computing thread may continue. On a GPU the device itself can wait, so a ticket is
*ordered* as soon as its last chunk is in the device's queue. A demand load is enqueued completely at once, a prefetch
with at most `OUTSTANDING` chunks in the queue.

A prefetch of three chunks, and a demand load that another thread submits meanwhile; time to the right:

    reading thread      | chunk 1, chunk 2 | wait for 1 | chunk 3 | order | wait for 2, 3 | over
    copy stream             | chunk 1 ........ | chunk 2 ........ | chunk 3 ........ |
    demand load                 ^ submitted here: enqueued behind chunk 2, and before chunk 3
    computing thread                                      `join` returns ^  `hold`, launch ...
    compute stream                                                      waits for the end of 3 | kernels

An emulated copy is never ordered before its end: `join` returns when it is over.
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

from smoe.memory.emulation import Emulation
from smoe.memory.expert_files import CHUNK_BYTES
from smoe.memory.reading_threads import Ticket
from smoe.memory.streams import Event, Streams

OUTSTANDING = 2
"""The maximum number of chunks of a prefetch in the device's queue: one is being copied, and one waits so that the link
is never idle."""

_Between = Callable[[], None] | None


class Link(Protocol):
    """Copies experts to the device. Several reading threads call it at once."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, ticket: Ticket, between: _Between) -> None:
        """Copy `source` (uint8 [n], on the host) to `target` on the device, and return when the copy is complete. The
        copy starts after the ticket's `free_event`.

        Calls `between` between two chunks, so that a more urgent copy can go first. Calls `ticket.order` as soon as the
        device itself can wait for the end of the copy.
        """

    def mark_free(self) -> Any:
        """Return an event after which the slots released until now may be overwritten; None if they may be overwritten
        at once."""

    def measured(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds, bytes) for every copy completed since the last call. The seconds do not include the time in
        which the copy waited for other copies."""

    def close(self) -> None: ...


class CudaLink:
    """The link between the host and a GPU, with a copy stream of its own. Reading threads wait for their copies; the
    computing thread never waits."""

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
            for _, ended in flying:  # the buffers may be reused only after the device has finished with them
                with suppress(Exception):
                    ended.synchronize()
            raise
        self._timed.append((seconds, nbytes))

    def _enqueue(self, source: torch.Tensor, target: torch.Tensor, free_event: Any) -> tuple[Event, Event]:
        """Enqueue a copy, with one event before and one event after the copy, and return both events. No other thread
        can enqueue anything between the events."""
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
    """Wait until one chunk has been copied, and return the seconds that the device took for it."""
    began, ended = marks
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


class EmulatedLink:
    """An emulated link: it copies within RAM at a profile's speed, one chunk at a time for all threads together."""

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
