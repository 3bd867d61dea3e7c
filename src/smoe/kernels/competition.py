"""Whether other programs compete for the cores with the calling thread, by how long the thread waits for a core."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

_INTERVAL_SECONDS = 1.0
"""The least time over which the share is measured."""
_MOST_SECONDS = 2.0
"""The longest time over which the share is measured. In a longer time the thread did something else, such as loading a
model, beside other threads of this program."""
_SHARE_OF_TOKENS = 0.23
"""For single tokens, another program competes if the thread waits for a core for at least this share of the time.

On two cores, a program that keeps one of them busy causes a share of 0.26 to 0.35. One that works half of the time, in
bursts of 5 to 100 ms, causes 0.09 to 0.19, and two threads are faster than one beside it."""
_SHARE_OF_PROMPTS = 0.08
"""The same for prompts, for which all threads are used anyway."""
_STAY_SECONDS = 2.0
"""The seconds for which a positive result remains valid. Meanwhile this program uses fewer threads, so its thread waits
less although the other program still runs."""
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
        self._until = {_SHARE_OF_TOKENS: 0.0, _SHARE_OF_PROMPTS: 0.0}

    def is_there(self, is_prompt: bool) -> bool:
        """Return whether other programs have competed for the thread's core in the last seconds. `is_prompt`: whether
        the answer is for a prompt, for which fewer other programs count."""
        now = self._now()
        elapsed = now - self._since
        if elapsed >= _INTERVAL_SECONDS:
            waited = self._waited()
            for share in self._until:
                if elapsed <= _MOST_SECONDS and waited - self._waited_before >= share * elapsed:
                    self._until[share] = now + _STAY_SECONDS
            self._since, self._waited_before = now, waited
        return now < self._until[_SHARE_OF_PROMPTS if is_prompt else _SHARE_OF_TOKENS]
