"""Least frequently used, with counts that outlive residency (as in MoE-Infinity's frequency baseline)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container

from smoe.expert import Copy
from smoe.policy.eviction.base import Eviction, used_copies
from smoe.routing import Routing


class LFU(Eviction):
    """Forget the resident used in the fewest steps since the start; O(residents) a question."""

    name = "lfu"

    def __init__(self) -> None:
        self._resident: set[Copy] = set()
        self._uses: Counter[Copy] = Counter()

    def insert(self, copy: Copy) -> None:
        self._resident.add(copy)

    def remove(self, copy: Copy) -> None:
        self._resident.remove(copy)

    def observe(self, routing: Routing) -> None:
        self._uses.update(used_copies(routing))

    def victims(self, count: int, shield: Container[Copy]) -> list[Copy]:
        uses = self._uses
        candidates = ((uses[copy], copy) for copy in self._resident if copy not in shield)
        return [copy for _, copy in heapq.nsmallest(count, candidates)]

    def worth(self, copy: Copy) -> float:
        return self._uses[copy]
