"""Belady's offline optimum, for traces whose future is known: no policy has fewer misses.

L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable

from smoe.expert import ExpertKey
from smoe.policy.eviction.base import Eviction, used_copies
from smoe.routing import Routing


class Belady(Eviction):
    """Evicts the resident whose next use is furthest in the future; `victims` costs O(residents log uses).

    `future`: all routings that `observe` will receive, in order. A resident that is never used again is evicted first.
    Ties break by (layer, expert).
    """

    name = "belady"
    settings = ("future",)
    only_replayed = "needs the future"

    def __init__(self, future: Iterable[Routing] = ()) -> None:
        self._resident: set[ExpertKey] = set()
        self._uses: dict[ExpertKey, list[int]] = defaultdict(list)
        self._now = -1
        for step, routing in enumerate(future):
            for key in used_copies(routing):
                self._uses[key].append(step)

    def insert(self, key: ExpertKey) -> None:
        self._resident.add(key)

    def remove(self, key: ExpertKey) -> None:
        self._resident.remove(key)

    def residents(self) -> set[ExpertKey]:
        return set(self._resident)

    def observe(self, routing: Routing) -> None:
        self._now += 1

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        candidates = ((-self._next_use(key), key) for key in self._resident if key not in shield)
        return [key for _, key in heapq.nsmallest(count, candidates)]

    def worth(self, key: ExpertKey) -> float:
        return -self._next_use(key)

    def _next_use(self, key: ExpertKey) -> float:
        uses = self._uses.get(key, [])
        position = bisect_right(uses, self._now)
        return uses[position] if position < len(uses) else float("inf")
