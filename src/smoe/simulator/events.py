"""A clock that processes events in the order of their times, and resources that do one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Events:
    """A clock that advances from event to event. Events of the same time happen in the order in which they were added.

    Times are in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, when: float, happen: Callable[[], None]) -> None:
        """Arrange that `happen` is called at the time `when`, which must not be in the past."""
        assert when >= self.now, (when, self.now)
        heappush(self._coming, (when, next(self._number), happen))

    def run(self) -> None:
        """Process events in the order of their times until no event is left."""
        while self._coming:
            self.now, _, happen = heappop(self._coming)
            happen()


class Resource:
    """A port, a link or a processor that does one piece of work at a time, in the order of the calls of `use`."""

    def __init__(self, events: Events) -> None:
        self.spans: list[tuple[float, float]] = []
        """(begin, end) of every piece of work in seconds, ascending."""
        self._events = events
        self._free = 0.0

    def use(self, seconds: float) -> float:
        """Occupy the resource for `seconds` after all earlier work. Return the time at which this work ends."""
        begin = max(self._events.now, self._free)
        self._free = begin + seconds
        self.spans.append((begin, self._free))
        return self._free

    @property
    def free(self) -> float:
        """The time at which the resource will have done all work that `use` has added so far."""
        return self._free

    @property
    def busy_seconds(self) -> float:
        return sum(end - begin for begin, end in self.spans)
