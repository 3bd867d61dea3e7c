"""The smallest threshold that meets a time per token (SMoE, second version, section V-C, equation 5).

Time falls nearly linearly with alpha, quality only falls; so a polynomial of low degree through a few measured points
is enough, and the answer is the smallest alpha whose fitted time is within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DEGREE = 2
STEP = 0.01
"""Resolution of the answer."""


def fitted_seconds(points: Sequence[tuple[float, float]], alphas: Sequence[float]) -> list[float]:
    """T(alpha) by a polynomial fitted to measured (alpha, seconds), made to fall: less quality never takes longer."""
    x, y = zip(*sorted(points), strict=True)
    curve = np.polynomial.Polynomial.fit(x, y, min(DEGREE, len(points) - 1))
    seconds: list[float] = np.minimum.accumulate(curve(np.asarray(alphas, dtype=float))).tolist()
    return seconds


def smallest_alpha(points: Sequence[tuple[float, float]], budget_seconds: float) -> float | None:
    """The smallest alpha, within the measured range, whose fitted time is within the budget; None where none is."""
    low, high = min(alpha for alpha, _ in points), max(alpha for alpha, _ in points)
    grid = [round(low + n * STEP, 6) for n in range(round((high - low) / STEP) + 1)]
    for alpha, seconds in zip(grid, fitted_seconds(points, grid), strict=True):
        if seconds <= budget_seconds:
            return alpha
    return None
