"""Least recently used: the baseline of Mixtral-Offloading and of nearly every expert cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from smoe.expert import Copy
from smoe.policy.eviction.base import Eviction, used_copies
from smoe.routing import Routing


class LRU(Eviction):
    """Forget the resident whose last use lies furthest back; O(count + shielded) a question.

    Experts of one step are touched in ascending order, so that ties inside a step break by (layer, expert).
    """

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[Copy, None] = OrderedDict()

    def insert(self, copy: Copy) -> None:
        self._order[copy] = None

    def remove(self, copy: Copy) -> None:
        del self._order[copy]

    def observe(self, routing: Routing) -> None:
        order = self._order
        for copy in used_copies(routing):
            if copy in order:
                order.move_to_end(copy)

    def victims(self, count: int, shield: Container[Copy]) -> list[Copy]:
        found: list[Copy] = []
        for copy in self._order:
            if len(found) == count:
                break
            if copy not in shield:
                found.append(copy)
        return found
