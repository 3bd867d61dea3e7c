"""Limits the rate of sending."""

from __future__ import annotations

import time
from collections.abc import Callable


class SendRate:
    """Limits transfers to a number of bytes per second. Time in which nothing was sent does not allow a higher rate
    later."""

    def __init__(self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`bytes_per_second`: None for no limit."""
        self._seconds_per_byte = 0.0 if bytes_per_second is None else 1 / bytes_per_second
        self._clock = clock
        self._free_at = clock()

    def left_seconds(self) -> float:
        """Return the seconds until the next bytes may be sent; 0 if they may be sent now."""
        return max(0.0, self._free_at - self._clock())

    def book(self, nbytes: int) -> None:
        """Record that `nbytes` bytes are being sent now."""
        self._free_at = max(self._free_at, self._clock()) + nbytes * self._seconds_per_byte
