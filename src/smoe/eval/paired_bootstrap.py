"""Computes confidence intervals of differences that were measured on the same blocks of text, or the same questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Change:
    """A measured difference from the exact model, with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def bootstrapped(statistic: Callable[[np.ndarray], float], count: int) -> Change:
    """Return the value of `statistic` for all `count` samples, with a confidence interval from samples drawn with
    replacement. Equal arguments give equal intervals.

    `statistic` is called with indices [count] of samples. A sample is a pair of measurements with the same index, so
    both are drawn together.
    """
    generator = np.random.default_rng(0)
    drawn = [statistic(generator.integers(0, count, count)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Change(statistic(np.arange(count)), float(low), float(high))
