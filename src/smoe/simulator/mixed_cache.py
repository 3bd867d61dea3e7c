"""The cost of eviction policies with low copies, and the search for the best weights of the multidimensional cache.

HOBBIT (arXiv 2411.01433, section 3.4) leaves the search open. The penalty of a replay is not a smooth function of the
weights, so there is no gradient, but it changes little between neighbouring points, and there are only three free
numbers. So all points of a coarse grid over the simplex are tried, and from the best one the search moves to better
neighbours, by a long step and then by a short one. That takes some fifty trials; shorter steps would only fit noise of
the traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import NamedTuple

from smoe.expert import EXACT, LOW
from smoe.policy.budget import MIN_STAGING_SLOTS
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.eviction.multidimensional import Multidimensional
from smoe.policy.eviction.pools import FormPools
from smoe.policy.registry import EVICTIONS
from smoe.policy.step import Switches
from smoe.routing import Routing, observation
from smoe.simulator.replay import replay

CacheWeights = tuple[float, float, float, float]
"""The weights (lru, lfu, lhu, fld)."""

PARTS = 12
"""The search is in twelfths."""
_COARSE = 4
_STEPS = (2, 1)
"""Steps in twelfths: between the points of the grid, and from a point to its neighbours."""
_GRID = [point for point in product(range(0, PARTS + 1, _COARSE), repeat=4) if sum(point) == PARTS]
_DIRECTIONS = list(permutations(range(4), 2))

Make = Callable[[Sequence[Routing]], Eviction]
"""A function that returns a new policy for one format; its argument is the future, which only Belady's needs."""


class MixedCache(NamedTuple):
    """A cache for copies of two formats, and the thresholds between them."""

    slots: int
    """Slots for full copies."""
    low_slots: int
    """Slots for low copies; 0: there are none."""
    low_cost: float
    """The cost of loading a low copy, relative to a full copy: the ratio of their bytes."""
    switches: Switches
    """The settings, including the thresholds of importance."""


def miss_penalty(traces: Sequence[Sequence[Routing]], cache: MixedCache, make: Make) -> float:
    """Return the cost of the decode steps' misses in loads of full copies; every trace starts with an empty cache."""
    total = 0.0
    for trace in traces:
        policy = FormPools({EXACT: make(trace), LOW: make(trace)}) if cache.low_slots else make(trace)
        counts = replay(trace, cache.slots, MIN_STAGING_SLOTS, policy, cache.switches, cache.low_slots)
        total += counts.penalty(cache.low_cost)
    return total


def named(name: str) -> Make:
    """Return a constructor of a policy of the registry."""
    kind = EVICTIONS.find(name)
    return lambda trace: kind.of_settings(EvictionSettings(name, future=map(observation, trace)))


def multidimensional(weights: CacheWeights, records: str = "sequence") -> Make:
    """Return a constructor of HOBBIT's cache with these weights."""
    return lambda trace: Multidimensional(weights, of_sequence=records == "sequence")


def best_weights(
    traces: Sequence[Sequence[Routing]],
    cache: MixedCache,
    records: str = "sequence",
    tick: Callable[[int, int], None] = lambda done, least: None,
) -> tuple[CacheWeights, float]:
    """Return (the weights of least penalty on `traces`, that penalty). Of equal ones, the smaller weights come first.

    `tick` receives, after every trial, the number of trials done, and the least number in all.
    """
    known: dict[tuple[int, ...], float] = {}

    def price(point: tuple[int, ...]) -> float:
        if point not in known:
            known[point] = miss_penalty(traces, cache, multidimensional(_weights(point), records))
            tick(len(known), max(len(known), len(_GRID) + len(_STEPS) * len(_DIRECTIONS) // 2))
        return known[point]

    best = min(_GRID, key=lambda point: (price(point), point))
    for step in _STEPS:
        while True:
            around = min(_neighbours(best, step), key=lambda point: (price(point), point))
            if price(around) >= price(best):
                break
            best = around
    return _weights(best), price(best)


def _neighbours(point: tuple[int, ...], step: int) -> Iterator[tuple[int, ...]]:
    """Yield all points where one weight is larger by a step, and another smaller."""
    for more, less in _DIRECTIONS:
        if point[less] >= step:
            yield tuple(part + step * (n == more) - step * (n == less) for n, part in enumerate(point))


def _weights(point: tuple[int, ...]) -> CacheWeights:
    lru, lfu, lhu, fld = (part / PARTS for part in point)
    return lru, lfu, lhu, fld
