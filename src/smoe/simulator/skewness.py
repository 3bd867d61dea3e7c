"""Estimates how unevenly a model uses its experts, from the hit ratio of a cache of known size.

A hit ratio alone does not determine the ratios of other sizes and policies. But one parameter of a synthetic trace
(`synthetic.py`), the skew, accounts for most of the differences between models. With the skew that gives a run's hit
ratio at its own cache size, the ratios at other sizes agree within a few points. This holds even for random routers,
which repeat their choices far more than texts do (docs/log/forecasts.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from smoe.policy.eviction.base import Eviction
from smoe.simulator.replay import replay
from smoe.simulator.synthetic import DrawnShape, Habits, synthesise

LEAST, MOST = 0.25, 4.0
"""The range of the search, as multiples of the usual skew."""
_HALVINGS = 6
_CHANCE = 0.02
"""How much the hit ratios of two synthetic traces with equal parameters differ by chance."""
_TELLING = 0.1
"""The smallest difference between the hit ratios at both ends of the range. If the difference is smaller, chance would
decide."""


def skew_of(
    hit_ratio: float,
    shape: DrawnShape,
    habits: Habits,
    slots: int,
    staging_slots: int,
    eviction: Callable[[], Eviction],
) -> float | None:
    """Return the factor for the skew of `habits` with which a cache of `slots` slots has this hit ratio, in the decode
    steps of a trace of `shape`. Return None if the hit ratio says nothing about the skew: the cache holds all experts
    or very few, or no factor between `LEAST` and `MOST` gives this ratio.

    The search takes some tenths of a second: O(tokens x layers x experts) for each of eight traces.
    """
    if slots >= shape.layers * shape.experts or hit_ratio >= 1.0:
        return None

    def hits(skew: float) -> float:
        trace = synthesise(shape, replace(habits, skew=skew * habits.skew), with_scores=True)
        return replay(trace, slots, staging_slots, eviction()).hit_ratio

    least, most = hits(LEAST), hits(MOST)
    if most - least < _TELLING or not least - _CHANCE <= hit_ratio <= most + _CHANCE:
        return None
    low, high = LEAST, MOST
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if hits(middle) < hit_ratio else (low, middle)
    return float((low * high) ** 0.5)
