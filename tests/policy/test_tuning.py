"""Would catch: a budget that is met by the largest threshold instead of the smallest, a bump taken for a slope."""

from __future__ import annotations

import pytest

from smoe.policy.tuning import fitted_seconds, smallest_alpha

LINE = [(alpha / 10, 0.1 - 0.1 * alpha / 10) for alpha in range(7)]


@pytest.mark.parametrize(("budget", "alpha"), [(0.2, 0.0), (0.1, 0.0), (0.08, 0.2), (0.0655, 0.35), (0.04, 0.6)])
def test_the_smallest_that_meets_the_budget(budget: float, alpha: float) -> None:
    assert smallest_alpha(LINE, budget + 1e-9) == pytest.approx(alpha, abs=0.006)


def test_out_of_reach_is_none() -> None:
    assert smallest_alpha(LINE, 0.03) is None


def test_noise_is_smoothed_and_never_rises() -> None:
    noisy = [(a, t * (1 + (-1) ** n * 0.03)) for n, (a, t) in enumerate(LINE)]
    grid = [n / 100 for n in range(61)]
    fitted = fitted_seconds(noisy, grid)
    assert fitted == sorted(fitted, reverse=True)
    assert all(abs(f - (0.1 - 0.1 * a)) < 0.003 for a, f in zip(grid, fitted, strict=True))


def test_two_points_are_a_line() -> None:
    assert smallest_alpha([(0.0, 2.0), (0.4, 1.0)], 1.5) == pytest.approx(0.2)
