"""The cost of eviction policies for a cache of full and low-precision copies, and the search for the best weights of
the multidimensional cache.

HOBBIT (arXiv 2411.01433, section 3.4) does not describe this search. The penalty of a replay is not a smooth function
of the weights, so it has no gradient. But it changes little between neighbouring points, and only three of the weights
are free. The search therefore tries all points of a coarse grid of weights with sum 1. From the best point it moves to
better neighbours, first by long steps, then by short ones. This takes some fifty replays. Shorter steps would only fit
noise of the traces.
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
from smoe.policy.step import Switches, observation
from smoe.routing import Routing
from smoe.simulator.replay import replay

CacheWeights = tuple[float, float, float, float]
"""The weights (lru, lfu, lhu, fld) of the multidimensional cache, with sum 1."""

PARTS = 12
"""The denominator of the weights in the search: all weights are multiples of one twelfth."""
_COARSE = 4
_STEPS = (2, 1)
"""The two distances by which the search changes weights, the longer first, in twelfths."""
_GRID = [point for point in product(range(0, PARTS + 1, _COARSE), repeat=4) if sum(point) == PARTS]
_DIRECTIONS = list(permutations(range(4), 2))

Make = Callable[[Sequence[Routing]], Eviction]
"""A function that returns a new policy for copies of one format. Its argument is the trace that will be replayed, which
only Belady's policy needs."""


class MixedCache(NamedTuple):
    """The sizes of a simulated cache for full and low-precision copies, and the settings of its decisions."""

    slots: int
    """The number of slots for full copies."""
    low_slots: int
    """The number of slots for low-precision copies; 0: there are none."""
    low_cost: float
    """The cost of loading a low-precision copy, as a fraction of that of a full copy: the ratio of their bytes."""
    switches: Switches
    """The settings that affect a decision, with the thresholds of importance."""


def miss_penalty(traces: Sequence[Sequence[Routing]], cache: MixedCache, make: Make) -> float:
    """Return the cost of the decode steps' misses, in loads of full copies. Every trace starts with an empty cache."""
    total = 0.0
    for trace in traces:
        policy = FormPools({EXACT: make(trace), LOW: make(trace)}) if cache.low_slots else make(trace)
        counts = replay(trace, cache.slots, MIN_STAGING_SLOTS, policy, cache.switches, cache.low_slots)
        total += counts.penalty(cache.low_cost)
    return total


def named(name: str) -> Make:
    """Return a function that makes the eviction policy of this name."""
    kind = EVICTIONS.find(name)
    return lambda trace: kind.of_settings(EvictionSettings(name, future=map(observation, trace)))


def multidimensional(weights: CacheWeights, records: str = "sequence") -> Make:
    """Return a function that makes HOBBIT's cache with these weights."""
    return lambda trace: Multidimensional(weights, of_sequence=records == "sequence")


def best_weights(
    traces: Sequence[Sequence[Routing]],
    cache: MixedCache,
    records: str = "sequence",
    tick: Callable[[int, int], None] = lambda done, least: None,
) -> tuple[CacheWeights, float]:
    """Return (the weights of least penalty on `traces`, this penalty). Of equal penalties, the weights that are first
    in ascending order win.

    `tick` is called after every replay with the number of replays so far and the least total number of replays.
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
    """Yield all weights in which one of the given weights is larger by `step` and another is smaller by `step`."""
    for more, less in _DIRECTIONS:
        if point[less] >= step:
            yield tuple(part + step * (n == more) - step * (n == less) for n, part in enumerate(point))


def _weights(point: tuple[int, ...]) -> CacheWeights:
    lru, lfu, lhu, fld = (part / PARTS for part in point)
    return lru, lfu, lhu, fld
