"""Eviction of the least recently used expert: the baseline of Mixtral-Offloading and of almost every expert cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from smoe.expert import ExpertKey
from smoe.policy.eviction.base import Eviction, used_copies
from smoe.routing import Routing


class LRU(Eviction):
    """Evicts the resident whose last use is the earliest; `victims` costs O(count + shielded).

    Experts of one step are recorded in ascending order, so that ties within a step break by (layer, expert).
    """

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def insert(self, key: ExpertKey) -> None:
        self._order[key] = None

    def remove(self, key: ExpertKey) -> None:
        del self._order[key]

    def residents(self) -> set[ExpertKey]:
        return set(self._order)

    def observe(self, routing: Routing) -> None:
        order = self._order
        for key in used_copies(routing):
            if key in order:
                order.move_to_end(key)

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        found: list[ExpertKey] = []
        for key in self._order:
            if len(found) == count:
                break
            if key not in shield:
                found.append(key)
        return found
