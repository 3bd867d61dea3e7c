"""Eviction of the least frequently used expert. Uses of experts that are not resident count too, as in MoE-Infinity's
frequency baseline."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container

from smoe.expert import ExpertKey
from smoe.policy.eviction.base import Eviction, used_copies
from smoe.routing import Routing


class LFU(Eviction):
    """Evicts the resident that was used in the fewest steps since the start; `victims` costs O(residents)."""

    name = "lfu"

    def __init__(self) -> None:
        self._resident: set[ExpertKey] = set()
        self._uses: Counter[ExpertKey] = Counter()

    def insert(self, key: ExpertKey) -> None:
        self._resident.add(key)

    def remove(self, key: ExpertKey) -> None:
        self._resident.remove(key)

    def residents(self) -> set[ExpertKey]:
        return set(self._resident)

    def observe(self, routing: Routing) -> None:
        self._uses.update(used_copies(routing))

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        uses = self._uses
        candidates = ((uses[key], key) for key in self._resident if key not in shield)
        return [key for _, key in heapq.nsmallest(count, candidates)]

    def worth(self, key: ExpertKey) -> float:
        return self._uses[key]
