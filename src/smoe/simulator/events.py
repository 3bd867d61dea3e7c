"""Things that happen at their times, and what can do one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Events:
    """A clock that goes from one event to the next; at one time they happen in the order in which they were asked for.

    Times in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """`when` is not past."""
        assert when >= self.now, (when, self.now)
        heappush(self._coming, (when, next(self._number), happen))

    def run(self) -> None:
        """Run until no event is left."""
        while self._coming:
            self.now, _, happen = heappop(self._coming)
            happen()


class Resource:
    """A port, a link, a processor: one piece of work after the other, in the order of asking."""

    def __init__(self, events: Events) -> None:
        self.spans: list[tuple[float, float]] = []
        """(begin, end) of every piece of work, ascending."""
        self._events = events
        self._free = 0.0

    def use(self, seconds: float) -> float:
        """Use it for so long, after all earlier uses; returns when it will have ended."""
        begin = max(self._events.now, self._free)
        self._free = begin + seconds
        self.spans.append((begin, self._free))
        return self._free

    @property
    def free(self) -> float:
        """When all that was asked for so far will be done."""
        return self._free

    @property
    def busy_seconds(self) -> float:
        return sum(end - begin for begin, end in self.spans)
