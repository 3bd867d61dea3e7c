"""Finds the smallest threshold alpha that meets a time per token (SMoE, second version, section V-C, equation 5).

A larger alpha makes tokens faster, nearly linearly, and quality lower. A polynomial of low degree is fitted to the
measured times of a few alphas. The result is the smallest alpha whose fitted time is within the budget.

Every alpha is measured in several rounds. Half of the difference between its fastest and its slowest round is its
noise.

A disk can be twice as fast an hour later, so times that depend on the disk are converted to one read rate. Reading that
overlaps computing costs no time; the rest is waiting:

    |---- computing, T - W ----|---- waiting, W ----|        T seconds per token
              |---------- reading, R ---------------|        R at the measured rate r, R r/r' at the rate r'

If reading takes d seconds longer, the token takes d longer. If it takes d less, the token takes d less, until there is
no waiting. This is inexact in two cases. Reads that end long before they are needed do not delay the token at once, so
the time for a much slower disk is overestimated. Late prefetches and the processor's time for reading are assumed
constant. On the wide demo, at rates 1.2 to 1.5 times apart, converted times were wrong by 0 to 14 %, unconverted times
by 15 to 46 % (docs/log/prefetch.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

DEGREE = 2
STEP = 0.01
"""The resolution of the chosen alpha."""


@dataclass(frozen=True)
class Timing:
    """The time per token with one alpha in one round, and the times that depend on the disk. All are medians over
    tokens."""

    seconds: float
    reading_seconds: float = 0.0
    """Seconds during which at least one read was running."""
    waiting_seconds: float = 0.0
    """Seconds of waiting for experts."""
    bytes_per_second: float | None = None
    """The read rate while a read was running; None if the time does not depend on reading."""
    first_bytes_per_second: float | None = None
    """The read rate during the first tokens after the start with empty slots, for comparison with a short measurement
    on another day."""

    def at_rate(self, bytes_per_second: float | None) -> float:
        """Return the seconds per token at another read rate in bytes per second; None: at the measured rate."""
        if bytes_per_second is None or self.bytes_per_second is None:
            return self.seconds
        longer = self.reading_seconds * (self.bytes_per_second / bytes_per_second - 1)
        return self.seconds + max(longer, -self.waiting_seconds)


def middle_rate(rates: Sequence[float | None]) -> float | None:
    """Return the median of the measured rates; None if there are none."""
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def fitted_seconds(points: Sequence[tuple[float, float]], alphas: Sequence[float]) -> list[float]:
    """Return the time in seconds of each of `alphas`, by a polynomial through the measured `points` (alpha, seconds).
    The times are made monotonic: a larger alpha never takes longer."""
    x, y = zip(*sorted(points), strict=True)
    curve = np.polynomial.Polynomial.fit(x, y, min(DEGREE, len(points) - 1))
    seconds: list[float] = np.minimum.accumulate(curve(np.asarray(alphas, dtype=float))).tolist()
    return seconds


def smallest_alpha(points: Sequence[tuple[float, float]], budget_seconds: float) -> float | None:
    """Return the smallest alpha in the measured range whose fitted time per token is within the budget; None if there
    is no such alpha."""
    grid = _grid(points)
    for alpha, seconds in zip(grid, fitted_seconds(points, grid), strict=True):
        if seconds <= budget_seconds:
            return alpha
    return None


def predicted_seconds(points: Sequence[tuple[float, float]], alpha: float) -> float:
    """Return the fitted time in seconds of one alpha in the measured range."""
    return fitted_seconds(points, [below for below in _grid(points) if below < alpha] + [alpha])[-1]


def half_ranges(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the noise of each alpha in seconds: half of the difference between its slowest and its fastest round. Each
    element of `rounds` has one time for each alpha."""
    ranges: list[float] = (np.ptp(np.asarray(rounds), axis=0) / 2).tolist()
    return ranges


def noise_seconds(rounds: Sequence[Sequence[float]]) -> float:
    """Return the median of the noise of all alphas, in seconds. With three rounds, the noise of a single alpha is
    unreliable."""
    return float(np.median(half_ranges(rounds)))


def is_flat(alphas: Sequence[float], rounds: Sequence[Sequence[float]]) -> bool:
    """Return whether alpha has so little effect that the fitted times at both ends of the range are equal within their
    noise.

    If the machine is slow for a minute, all alphas of one round are slow, which is no effect of alpha. So each round is
    first scaled to the same median.
    """
    seconds = np.asarray(rounds)
    level = seconds / np.median(seconds, axis=1, keepdims=True) * np.median(seconds)
    points = list(zip(alphas, np.median(level, axis=0).tolist(), strict=True))
    fitted = fitted_seconds(points, sorted(alphas))
    return fitted[0] - fitted[-1] <= 2 * noise_seconds(level.tolist())


def is_within_noise(points: Sequence[tuple[float, float]], budget_seconds: float, noise: float) -> bool:
    """Return whether `noise` seconds could change the chosen alpha by more than the distance of two measured alphas, or
    make the budget unreachable."""
    lowest, highest = (smallest_alpha(points, budget_seconds + moved) for moved in (noise, -noise))
    spacing = float(np.diff(sorted(alpha for alpha, _ in points)).max())
    return lowest is None or highest is None or highest - lowest > spacing + STEP / 2


def _grid(points: Sequence[tuple[float, float]]) -> list[float]:
    low, high = min(alpha for alpha, _ in points), max(alpha for alpha, _ in points)
    return [round(low + n * STEP, 6) for n in range(round((high - low) / STEP) + 1)]
