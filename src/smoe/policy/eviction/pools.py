"""Slots shared out among the layers: one eviction policy for each, so that no layer starves another.

In one global pool a layer whose experts score alike, or are used in turn, loses its slots to the others. Here every
layer has an equal share. A layer that has it gives up its own experts; one that has less takes from those that have
more, the fullest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from smoe.expert import ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.routing import Routing


class LayerPools(Eviction):
    """A policy of its own for every layer, each with `share` slots."""

    name = "layer pools"

    def __init__(self, make: Callable[[], Eviction], share: int) -> None:
        assert share > 0, share
        self._make = make
        self._share = share
        self._pools: dict[int, Eviction] = {}
        self._sizes: Counter[int] = Counter()
        self._running = 0
        """The layer whose router has spoken last: whoever asks for victims asks for it."""

    @property
    def rule(self) -> str:
        """Those of the layers, each once."""
        return ", ".join(sorted({pool.rule for pool in self._pools.values()}))

    def insert(self, key: ExpertKey) -> None:
        self._pool(key[0]).insert(key)
        self._sizes[key[0]] += 1

    def remove(self, key: ExpertKey) -> None:
        self._pool(key[0]).remove(key)
        self._sizes[key[0]] -= 1

    def observe(self, routing: Routing) -> None:
        self._running = routing.layer
        self._pool(routing.layer).observe(routing)

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        """First what others have beyond their share, as far as this layer lacks of its own; then its own; then any."""
        found = [key for key in self._surplus() if key not in shield][: max(0, count)]
        for layer in (self._running, *self._others()):
            if len(found) < count:
                wanted = self._pool(layer).victims(count, shield)
                found += [key for key in wanted if key not in found][: count - len(found)]
        return found

    def worth(self, key: ExpertKey) -> float:
        return self._pool(key[0]).worth(key)

    def _surplus(self) -> list[ExpertKey]:
        lacking = self._share - self._sizes[self._running]
        taken: list[ExpertKey] = []
        for layer in self._others():
            beyond = min(lacking - len(taken), self._sizes[layer] - self._share)
            if beyond <= 0:
                break
            taken += self._pools[layer].victims(beyond, ())
        return taken

    def _others(self) -> list[int]:
        """The other layers, the fullest first."""
        sizes = self._sizes
        return sorted((layer for layer in self._pools if layer != self._running), key=lambda n: (-sizes[n], n))

    def _pool(self, layer: int) -> Eviction:
        if layer not in self._pools:
            self._pools[layer] = self._make()
        return self._pools[layer]
