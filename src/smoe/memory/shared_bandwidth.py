"""One memory that several streams of bytes share: what the link and the CPU of an emulated machine read from.

Every stream has a rate of its own that it cannot exceed. While all rates together are more than the memory gives, all
are slowed down alike:

    rates wanted   link 24, CPU 38, memory 38 GB/s
    link           | 24 | 14.7 ..... | 24 |
    CPU                 | 23.3 ..... |         ended: the link is alone again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

OVERSLEPT_SECONDS = 150e-6
"""How much later than asked a thread may be woken: the last bit of a wait is spent awake."""
_ROUNDING_SECONDS = 1e-9
"""A flow that has so little left to do has ended: no wait is so short."""


class Flow:
    """One piece of work that reads memory."""

    def __init__(self, rate: float, nbytes: float) -> None:
        self.rate = rate
        """Bytes a second that it reads alone."""
        self.left = nbytes
        """Bytes that it still has to read."""
        self.ended: float | None = None
        """When it had read all, on the real clock; None: not yet."""


class SharedBandwidth:
    """Hands out `bytes_per_second` among flows. Any thread may hold one."""

    def __init__(self, bytes_per_second: float) -> None:
        self._total = bytes_per_second
        self._flows: list[Flow] = []
        self._changed = threading.Condition()
        self._updated_at = time.perf_counter()
        """Up to when flows have been moved on."""

    @contextmanager
    def reading(self, rate: float, nbytes: float) -> Iterator[Flow]:
        """Read `nbytes` at `rate` or slower while the body runs; leaves when body and reading have ended."""
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
        """The share of its own rate that every flow gets at present."""
        return min(1.0, self._total / sum(flow.rate for flow in self._flows))

    def _move_on(self) -> None:
        """Let time pass up to now, from one flow's end to the next."""
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
