"""Would catch: a budget that is met by the largest threshold instead of the smallest, a bump taken for a slope, a slow
minute taken for noise of alpha, noise taken for speed, a disk's mood taken for alpha's doing.
"""

from __future__ import annotations

import numpy as np
import pytest

from smoe.policy.tuning import (
    Timing,
    fitted_seconds,
    half_ranges,
    is_flat,
    is_within_noise,
    middle_rate,
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


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [
        (2e9, 0.25),  # as measured
        (1e9, 0.45),  # the 0.2 s of reading take 0.2 s longer, all of it waited for
        (2.5e9, 0.21),  # 0.04 s shorter
        (4e9, 0.15),  # 0.1 s shorter
        (20e9, 0.10),  # 0.18 s shorter, but only 0.15 s were waited for: the computing stays
        (None, 0.25),
    ],
)
def test_a_time_at_another_rate_of_reading(rate: float | None, seconds: float) -> None:
    """0.1 s of computing covers 0.05 s of 0.2 s of reading."""
    timing = Timing(0.25, reading_seconds=0.2, waiting_seconds=0.15, bytes_per_second=2e9)
    assert timing.at_rate(rate) == pytest.approx(seconds)


def test_what_does_not_hang_on_reading_stays() -> None:
    assert Timing(0.25).at_rate(1e9) == 0.25


def test_there_and_back_is_the_same_time() -> None:
    slow = Timing(0.25, reading_seconds=0.2, waiting_seconds=0.15, bytes_per_second=1e9)
    fast = Timing(slow.at_rate(1.6e9), 0.2 / 1.6, 0.15 - 0.2 * (1 - 1 / 1.6), 1.6e9)
    assert fast.at_rate(1e9) == pytest.approx(slow.seconds)


def test_the_middle_rate_is_of_what_was_measured() -> None:
    assert middle_rate([None, 3e9, 1e9, 2e9, None]) == 2e9
    assert middle_rate([None]) is None is middle_rate([])
