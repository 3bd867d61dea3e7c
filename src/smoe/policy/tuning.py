"""The smallest threshold that meets a time per token (SMoE, second version, section V-C, equation 5).

Time falls nearly linearly with alpha, quality only falls; so a polynomial of low degree through a few measured points
is enough, and the answer is the smallest alpha whose fitted time is within the budget.

Every alpha is measured in several rounds; half of what lies between the fastest and the slowest is its noise.

A disk can be twice as fast an hour later, so times that depend on it are given for one rate of reading. What the
computing covers of the reading stays covered; the rest is waited for:

    |---- computing, T - W ----|---- waiting, W ----|        T seconds a token
              |---------- reading, R ---------------|        R at the rate measured, R r/r' at the rate r'

Reading that takes d longer makes the token d longer; d shorter makes it d shorter, until nothing is waited for. Where
this is wrong: reads that were covered with time to spare surface at once, so a much slower disk is made out worse than
it is; prefetches that come too late or just in time, and the processor's time for reading, are taken to stay as they
were. Measured on the wide demo at rates 1.2 to 1.5 times apart, such times miss by 0 to 14 %, as they stand by 15 to
46 % (docs/log/prefetch.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

DEGREE = 2
STEP = 0.01
"""Resolution of the answer."""


@dataclass(frozen=True)
class Timing:
    """What a token took with one alpha in one round, and what of it hung on the disk: medians over tokens."""

    seconds: float
    reading_seconds: float = 0.0
    """During which at least one read was running."""
    waiting_seconds: float = 0.0
    """Seconds of waiting for experts."""
    bytes_per_second: float | None = None
    """While a read was running; None where the time does not depend on reading."""
    first_bytes_per_second: float | None = None
    """The same of the first tokens after the cold start: what a short look some other day can be compared with."""

    def at_rate(self, bytes_per_second: float | None) -> float:
        """Seconds a token, were reading so fast; None: as it was."""
        if bytes_per_second is None or self.bytes_per_second is None:
            return self.seconds
        longer = self.reading_seconds * (self.bytes_per_second / bytes_per_second - 1)
        return self.seconds + max(longer, -self.waiting_seconds)


def middle_rate(rates: Sequence[float | None]) -> float | None:
    """The median of what was measured; None where nothing was."""
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def fitted_seconds(points: Sequence[tuple[float, float]], alphas: Sequence[float]) -> list[float]:
    """The time of every alpha by a polynomial through measured (alpha, seconds), made to fall: less quality never takes
    longer."""
    x, y = zip(*sorted(points), strict=True)
    curve = np.polynomial.Polynomial.fit(x, y, min(DEGREE, len(points) - 1))
    seconds: list[float] = np.minimum.accumulate(curve(np.asarray(alphas, dtype=float))).tolist()
    return seconds


def smallest_alpha(points: Sequence[tuple[float, float]], budget_seconds: float) -> float | None:
    """The smallest alpha, within the measured range, whose fitted time is within the budget; None where none is."""
    grid = _grid(points)
    for alpha, seconds in zip(grid, fitted_seconds(points, grid), strict=True):
        if seconds <= budget_seconds:
            return alpha
    return None


def predicted_seconds(points: Sequence[tuple[float, float]], alpha: float) -> float:
    """The fitted time of an alpha from the measured range."""
    return fitted_seconds(points, [below for below in _grid(points) if below < alpha] + [alpha])[-1]


def half_ranges(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The noise of every alpha; `rounds` hold one time for each."""
    ranges: list[float] = (np.ptp(np.asarray(rounds), axis=0) / 2).tolist()
    return ranges


def noise_seconds(rounds: Sequence[Sequence[float]]) -> float:
    """The noise of a typical alpha: of three rounds, one alpha's own says little."""
    return float(np.median(half_ranges(rounds)))


def is_flat(alphas: Sequence[float], rounds: Sequence[Sequence[float]]) -> bool:
    """Whether the fitted time falls so little that both ends, with their noise, overlap.

    A slow minute slows all alphas of its round, which says nothing about alpha: rounds are brought to one level first.
    """
    seconds = np.asarray(rounds)
    level = seconds / np.median(seconds, axis=1, keepdims=True) * np.median(seconds)
    points = list(zip(alphas, np.median(level, axis=0).tolist(), strict=True))
    fitted = fitted_seconds(points, sorted(alphas))
    return fitted[0] - fitted[-1] <= 2 * noise_seconds(level.tolist())


def is_within_noise(points: Sequence[tuple[float, float]], budget_seconds: float, noise: float) -> bool:
    """Whether noise (seconds) could move the answer by more than lies between two measured alphas, or out of reach."""
    lowest, highest = (smallest_alpha(points, budget_seconds + moved) for moved in (noise, -noise))
    spacing = float(np.diff(sorted(alpha for alpha, _ in points)).max())
    return lowest is None or highest is None or highest - lowest > spacing + STEP / 2


def _grid(points: Sequence[tuple[float, float]]) -> list[float]:
    low, high = min(alpha for alpha, _ in points), max(alpha for alpha, _ in points)
    return [round(low + n * STEP, 6) for n in range(round((high - low) / STEP) + 1)]
