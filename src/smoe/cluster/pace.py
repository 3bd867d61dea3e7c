"""No more than so many bytes a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class SendRate:
    """What goes takes its time, whether or not the wire would; what was not used before is not made up for."""

    def __init__(self, bytes_per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """None: as fast as it goes."""
        self._seconds_per_byte = 0.0 if bytes_per_second is None else 1 / bytes_per_second
        self._clock = clock
        self._free_at = clock()

    def left_seconds(self) -> float:
        """Seconds until the next bytes may be sent; 0 where they may go now."""
        return max(0.0, self._free_at - self._clock())

    def book(self, nbytes: int) -> None:
        """So many bytes go now."""
        self._free_at = max(self._free_at, self._clock()) + nbytes * self._seconds_per_byte
