"""Whether other programs compete for the cores with the calling thread, by how long the thread waits for a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_WINDOW_SECONDS = 0.2
"""The least time over which the share is measured."""
_LONGEST_SECONDS = 1.0
"""The longest time over which it is measured. In a longer time between two calls the thread was idle, or did something
else, such as loading a model together with other threads of this program."""
_SHARE = 0.2
"""Another program competes if the thread waits for a core during at least this share of the time. On two cores, a
program that keeps one of them busy causes a share of 0.26 to 0.35, and one that works half of the time, in bursts of 5
to 100 ms, some 0.16 in the mean, in single windows more."""
_WINDOWS = 5
"""For single tokens, the number of successive windows with that share from which on another program competes. So bursts
do not count, because two threads are faster than one then. For prompts one window is enough."""
_STAY_SECONDS = {False: 5.0, True: 2.0}
"""The seconds for which a positive result remains valid, for single tokens and for prompts. Meanwhile this program uses
fewer threads, so its thread waits less although the other program still runs."""
_WAITS = Path("/proc/thread-self/schedstat")
"""Linux: three numbers for the calling thread, of which the second is the nanoseconds in which it was ready to run
without a core."""


def waited_seconds() -> float:
    """Return how long the calling thread has been ready to run without a core; 0 on systems that do not measure it."""
    try:
        return int(_WAITS.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Competition:
    """Watches how long the thread that calls `is_there` waits for a core. If another thread begins to call it, the
    first share compares the times of two threads and may be wrong, for two seconds at most."""

    def __init__(
        self, waited: Callable[[], float] = waited_seconds, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._waited, self._now = waited, now
        self._since, self._waited_before = now(), waited()
        self._in_a_row = 0
        self._until = {False: 0.0, True: 0.0}

    def is_there(self, is_prompt: bool) -> bool:
        """Return whether other programs have competed for the thread's core in the last seconds. `is_prompt`: whether
        the answer is for a prompt, for which shorter competition counts."""
        now = self._now()
        elapsed = now - self._since
        if elapsed >= _WINDOW_SECONDS:
            waited = self._waited()
            waits = elapsed <= _LONGEST_SECONDS and waited - self._waited_before >= _SHARE * elapsed
            self._in_a_row = self._in_a_row + 1 if waits else 0
            for of_prompt, competes in ((True, waits), (False, self._in_a_row >= _WINDOWS)):
                if competes:
                    self._until[of_prompt] = now + _STAY_SECONDS[of_prompt]
            self._since, self._waited_before = now, waited
        return now < self._until[is_prompt]
