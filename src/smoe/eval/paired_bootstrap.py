"""The confidence interval of a difference that was measured on the same blocks of text, or the same questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Change:
    """A difference from alpha 0 with its interval of 95 %."""

    value: float
    low: float
    high: float


def bootstrapped(statistic: Callable[[np.ndarray], float], count: int) -> Change:
    """`statistic` of all `count` samples, and its quantiles over samples drawn with replacement (seeded).

    `statistic` is given indices [count] of samples; both sides of a pair are drawn together.
    """
    generator = np.random.default_rng(0)
    drawn = [statistic(generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Change(statistic(np.arange(count)), float(low), float(high))
