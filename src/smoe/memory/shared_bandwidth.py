"""A memory bandwidth shared by several flows, for the link and the CPU of an emulated machine.

Every flow has a maximum rate of its own. If their sum exceeds the bandwidth, all are slowed down by the same factor:

    maximum rates  link 24, CPU 38, memory 38 GB/s
    link           | 24 | 14.7 ..... | 24 |
    CPU                 | 23.3 ..... |         done: the link has the memory for itself again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

OVERSLEPT_SECONDS = 150e-6
"""How much later than requested a thread may wake up; the end of a wait is spent spinning."""
_ROUNDING_SECONDS = 1e-9
"""A flow with less time left than this is done, because no wait is so short."""


class Flow:
    """One piece of work that reads memory."""

    def __init__(self, rate: float, nbytes: float) -> None:
        self.rate = rate
        """The number of bytes per second without other flows."""
        self.left = nbytes
        """The number of bytes left to read."""
        self.ended: float | None = None
        """The time when the flow had read all bytes, on the real clock; None before."""


class SharedBandwidth:
    """Distributes `bytes_per_second` among flows of any threads."""

    def __init__(self, bytes_per_second: float) -> None:
        self._total = bytes_per_second
        self._flows: list[Flow] = []
        self._changed = threading.Condition()
        self._updated_at = time.perf_counter()
        """The time up to which flows have been updated."""

    @contextmanager
    def reading(self, rate: float, nbytes: float) -> Iterator[Flow]:
        """Read `nbytes` at `rate` or slower while the body runs; the context ends when both have ended."""
        flow = Flow(rate, nbytes)
        with self._changed:
            self._move_on()
            self._flows.append(flow)
            self._changed.notify_all()
        try:
            yield flow
        except BaseException:
            with self._changed:
                self._move_on()
                if flow in self._flows:
                    self._flows.remove(flow)
                self._changed.notify_all()
            raise
        with self._changed:
            self._move_on()
            while flow.ended is None:
                share = self._share()
                next_end = min(flow.left / (flow.rate * share) for flow in self._flows)
                self._changed.wait(max(0.0, next_end - OVERSLEPT_SECONDS))
                self._move_on()

    def _share(self) -> float:
        """Return the fraction of its own rate that every flow currently gets."""
        return min(1.0, self._total / sum(flow.rate for flow in self._flows))

    def _move_on(self) -> None:
        """Update the flows to the current time, from the end of one flow to the next."""
        now = time.perf_counter()
        while self._flows:
            share = self._share()
            first = min(self._flows, key=lambda flow: flow.left / flow.rate)
            ends = self._updated_at + first.left / (first.rate * share)
            until = min(now, ends)
            for flow in self._flows:
                flow.left = max(0.0, flow.left - flow.rate * share * (until - self._updated_at))
            self._updated_at = until
            if ends > now + _ROUNDING_SECONDS:
                break
            first.ended, first.left = ends, 0.0
            self._flows.remove(first)
            self._changed.notify_all()
        self._updated_at = now
