"""How much a model's routers like some experts more than others, by how often a cache of a known size found them.

A hit ratio alone says nothing of other sizes and policies. But of the habits that a drawn trace has (`synthetic.py`)
one, the skew, says most of it: with the skew that gives a run's hit ratio at its own size the ratios at others come out
within a few points, of random routers that repeat themselves far more than texts do, too (docs/log/forecasts.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from smoe.policy.eviction.base import Eviction
from smoe.simulator.replay import replay
from smoe.simulator.synthetic import DrawnShape, Habits, synthesise

LEAST, MOST = 0.25, 4.0
"""Times the usual skew, between which it is looked for."""
_HALVINGS = 6
_CHANCE = 0.02
"""The difference by which two traces of the same habits differ."""
_TELLING = 0.1
"""Hit ratios of the two ends lie at least so far apart: else chance decides what is between them."""


def skew_of(
    hit_ratio: float,
    shape: DrawnShape,
    habits: Habits,
    slots: int,
    staging_slots: int,
    eviction: Callable[[], Eviction],
) -> float | None:
    """How many times the skew of `habits` a trace of `shape` has in whose decode steps a cache of `slots` hits so
    often; None where hits tell nothing: the cache holds everything, or so little that all skews hit alike, or no skew
    between `LEAST` and `MOST` hits so often.

    Some tenths of a second: O(tokens x layers x experts) for each of eight traces.
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
