"""Whether other programs compete for the cores with the calling thread, by how often the system takes its core away."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_INTERVAL_SECONDS = 0.1
"""The least time over which a rate is measured."""
_RATE = 25.0
"""The rate, in lost cores a second, from which another program competes. A busy program on the same core causes 60 or
more, an idle system less than 10."""
_STAY_SECONDS = 2.0
"""How long the answer stays true. Threads that avoid the other program's core lose theirs less often meanwhile."""


def preemptions() -> int:
    """Return how often the system has taken the core of the calling thread for another thread; 0 on systems that do not
    count it for a thread."""
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class Competition:
    """Watches how often the thread that calls `is_there` loses its core. If another thread begins to call it, the first
    rate compares the counts of two threads and may be wrong, for two seconds at most."""

    def __init__(self, count: Callable[[], int] = preemptions, now: Callable[[], float] = time.perf_counter) -> None:
        self._count, self._now = count, now
        self._since, self._counted = now(), count()
        self._until = 0.0

    def is_there(self) -> bool:
        """Return whether other programs have competed for the thread's core in the last two seconds."""
        now = self._now()
        elapsed = now - self._since
        if elapsed >= _INTERVAL_SECONDS:
            counted = self._count()
            if (counted - self._counted) / elapsed >= _RATE:
                self._until = now + _STAY_SECONDS
            self._since, self._counted = now, counted
        return now < self._until
