"""Would catch: a budget that is met by the largest threshold instead of the smallest, a bump taken for a slope, a slow
minute taken for noise of alpha, noise taken for speed.
"""

from __future__ import annotations

import numpy as np
import pytest

from smoe.policy.tuning import (
    fitted_seconds,
    half_ranges,
    is_flat,
    is_within_noise,
    noise_seconds,
    predicted_seconds,
    smallest_alpha,
)

ALPHAS = [alpha / 10 for alpha in range(7)]
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


def test_noise_is_half_of_what_lies_between_the_rounds() -> None:
    rounds = [[1.0, 5.0, 2.0], [3.0, 5.0, 8.0], [2.0, 5.0, 4.0]]
    assert half_ranges(rounds) == [1.0, 0.0, 3.0]
    assert noise_seconds(rounds) == 1.0


def test_a_slow_round_does_not_hide_a_slope() -> None:
    """The second round takes three times as long: far more than alpha brings, but the same for all alphas."""
    times = [seconds for _, seconds in LINE]
    rounds = [times, [3 * seconds for seconds in times], [1.01 * seconds for seconds in times]]
    assert noise_seconds(rounds) > times[0] - times[-1] > 0.05
    assert not is_flat(ALPHAS, rounds)


def test_pure_noise_is_flat_and_a_slope_above_it_is_not() -> None:
    """Of 200 drawn tables of pure noise about one in sixteen shows a slope (12 here)."""
    generator = np.random.default_rng(0)
    noise = generator.normal(0.1, 0.002, (200, 3, 7))
    slope = np.linspace(0.01, 0, 7)
    assert sum(is_flat(ALPHAS, rounds.tolist()) for rounds in noise) == 188
    assert not any(is_flat(ALPHAS, (rounds + slope).tolist()) for rounds in noise)


@pytest.mark.parametrize(
    ("budget", "noise", "is_within"),
    [(0.2, 0.01, False), (0.07, 0.001, False), (0.07, 0.02, True), (0.042, 0.004, True), (0.03, 0.004, True)],
)
def test_a_budget_within_the_noise(budget: float, noise: float, is_within: bool) -> None:
    """Longer than any time; far from noise; noise wider than two measured alphas; at the end; out of reach."""
    assert is_within_noise(LINE, budget, noise) == is_within


def test_a_prediction_is_the_fitted_time() -> None:
    assert predicted_seconds(LINE, 0.25) == pytest.approx(0.075)
    rising = [(alpha, 1 + alpha) for alpha in ALPHAS]
    assert predicted_seconds(rising, 0.6) == pytest.approx(1.0), "less quality never takes longer"
