"""Finds the smallest threshold alpha that meets a time per token (SMoE, second version, section V-C, equation 5).

Time falls nearly linearly with alpha, and quality only falls. So a polynomial of low degree through a few measured
points suffices, and the result is the smallest alpha whose fitted time is within the budget.

Every alpha is measured in several rounds; half of the difference between the fastest and the slowest is its noise.

A disk can be twice as fast an hour later, so times that depend on it are stated for one read rate. The part of reading
that overlaps computing stays hidden; the rest is waiting:

    |---- computing, T - W ----|---- waiting, W ----|        T seconds per token
              |---------- reading, R ---------------|        R at the measured rate r, R r/r' at the rate r'

Reading that takes d longer makes the token d longer; reading that takes d less makes it d shorter, until there is no
waiting. This is wrong in two cases: reads that end long before they are needed do not delay the token at once, so a
much slower disk is estimated worse than it is; late prefetches and the processor's time for reading are assumed
constant. On the wide demo, at rates 1.2 to 1.5 times apart, such times were wrong by 0 to 14 %, uncorrected times by 15
to 46 % (docs/log/prefetch.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

DEGREE = 2
STEP = 0.01
"""The resolution of the result."""


@dataclass(frozen=True)
class Timing:
    """The time per token with one alpha in one round, and the parts that depend on the disk: medians over tokens."""

    seconds: float
    reading_seconds: float = 0.0
    """Seconds during which at least one read was running."""
    waiting_seconds: float = 0.0
    """Seconds of waiting for experts."""
    bytes_per_second: float | None = None
    """The read rate while a read was running; None where the time does not depend on reading."""
    first_bytes_per_second: float | None = None
    """The read rate of the first tokens after the cold start, for comparison with a short measurement on another
    day."""

    def at_rate(self, bytes_per_second: float | None) -> float:
        """Return the seconds per token at another read rate; None: at the measured one."""
        if bytes_per_second is None or self.bytes_per_second is None:
            return self.seconds
        longer = self.reading_seconds * (self.bytes_per_second / bytes_per_second - 1)
        return self.seconds + max(longer, -self.waiting_seconds)


def middle_rate(rates: Sequence[float | None]) -> float | None:
    """Return the median of the measured rates; None where there are none."""
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def fitted_seconds(points: Sequence[tuple[float, float]], alphas: Sequence[float]) -> list[float]:
    """Return the time of every alpha by a polynomial through measured (alpha, seconds), made monotonic: less quality
    never takes longer."""
    x, y = zip(*sorted(points), strict=True)
    curve = np.polynomial.Polynomial.fit(x, y, min(DEGREE, len(points) - 1))
    seconds: list[float] = np.minimum.accumulate(curve(np.asarray(alphas, dtype=float))).tolist()
    return seconds


def smallest_alpha(points: Sequence[tuple[float, float]], budget_seconds: float) -> float | None:
    """Return the smallest alpha in the measured range whose fitted time is within the budget; None where there is
    none."""
    grid = _grid(points)
    for alpha, seconds in zip(grid, fitted_seconds(points, grid), strict=True):
        if seconds <= budget_seconds:
            return alpha
    return None


def predicted_seconds(points: Sequence[tuple[float, float]], alpha: float) -> float:
    """Return the fitted time, in seconds, of an alpha in the measured range."""
    return fitted_seconds(points, [below for below in _grid(points) if below < alpha] + [alpha])[-1]


def half_ranges(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return the noise of every alpha in seconds; each of `rounds` has one time for each alpha."""
    ranges: list[float] = (np.ptp(np.asarray(rounds), axis=0) / 2).tolist()
    return ranges


def noise_seconds(rounds: Sequence[Sequence[float]]) -> float:
    """Return the median noise of all alphas in seconds: with three rounds, the noise of one alpha is uncertain."""
    return float(np.median(half_ranges(rounds)))


def is_flat(alphas: Sequence[float], rounds: Sequence[Sequence[float]]) -> bool:
    """Return whether the fitted time falls so little that both ends overlap within their noise.

    A slow minute slows all alphas of its round, which is no effect of alpha: rounds are scaled to one level first.
    """
    seconds = np.asarray(rounds)
    level = seconds / np.median(seconds, axis=1, keepdims=True) * np.median(seconds)
    points = list(zip(alphas, np.median(level, axis=0).tolist(), strict=True))
    fitted = fitted_seconds(points, sorted(alphas))
    return fitted[0] - fitted[-1] <= 2 * noise_seconds(level.tolist())


def is_within_noise(points: Sequence[tuple[float, float]], budget_seconds: float, noise: float) -> bool:
    """Return whether noise of so many seconds could change the chosen alpha by more than one measured alpha, or make
    the budget unreachable."""
    lowest, highest = (smallest_alpha(points, budget_seconds + moved) for moved in (noise, -noise))
    spacing = float(np.diff(sorted(alpha for alpha, _ in points)).max())
    return lowest is None or highest is None or highest - lowest > spacing + STEP / 2


def _grid(points: Sequence[tuple[float, float]]) -> list[float]:
    low, high = min(alpha for alpha, _ in points), max(alpha for alpha, _ in points)
    return [round(low + n * STEP, 6) for n in range(round((high - low) / STEP) + 1)]
