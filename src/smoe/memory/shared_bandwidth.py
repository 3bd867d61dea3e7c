"""A memory bandwidth that several flows of bytes share: those of the link and of the CPU of an emulated machine.

Every flow has a maximum rate of its own. If the sum of the rates exceeds the bandwidth, all flows are slowed down by
the same factor. An example with the maximum rates link 24, CPU 38 and memory 38 GB/s, time to the right:

    link     | 24 | 14.7 ..... | 24 |
    CPU           | 23.3 ..... |         the CPU is done, and the link gets its maximum rate again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

OVERSLEPT_SECONDS = 150e-6
"""How much later than requested the system may wake a thread. The last part of a wait is therefore spent spinning."""
_ROUNDING_SECONDS = 1e-9
"""A flow that has less time left than this is done, because no wait is so short."""


class Flow:
    """Memory traffic of one piece of work: a number of bytes that it reads at a certain rate."""

    def __init__(self, rate: float, nbytes: float) -> None:
        self.rate = rate
        """The rate without other flows, in bytes per second."""
        self.left = nbytes
        """The number of bytes that remain to be read."""
        self.ended: float | None = None
        """The time on the real clock when all bytes had been read; None before."""


class SharedBandwidth:
    """Divides a memory bandwidth of `bytes_per_second` among flows of any threads."""

    def __init__(self, bytes_per_second: float) -> None:
        self._total = bytes_per_second
        self._flows: list[Flow] = []
        self._changed = threading.Condition()
        self._updated_at = time.perf_counter()
        """The time up to which the state of the flows has been computed."""

    @contextmanager
    def reading(self, rate: float, nbytes: float) -> Iterator[Flow]:
        """Emulate reading `nbytes` at `rate` bytes per second or slower, during the `with` block. At its end, wait
        until the bytes would have been read."""
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
        """Return the factor, at most 1, by which the rate of every flow is currently multiplied."""
        return min(1.0, self._total / sum(flow.rate for flow in self._flows))

    def _move_on(self) -> None:
        """Update the remaining bytes of all flows to the current time. The rates change whenever a flow ends, so the
        update goes from one end to the next."""
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
