"""Verdicts by hand."""

from __future__ import annotations

import pytest

from bench.papers.claims import Claim


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        ((1.5, 7.0), (1.6, 3.0), "holds"),
        ((1.5, 7.0), (1.46, 3.0), "holds"),
        ((1.5, 7.0), (1.36, 3.0), "holds in part"),
        ((1.02, 1.04), (1.003, 1.01), "holds, by less"),
        ((1.5, 7.0), (0.9, 3.0), "holds in part"),
        ((1.5, 7.0), (1.1, 1.2), "holds, by less"),
        ((1.5, 7.0), (0.9, 1.2), "does not hold"),
        ((1.05, 1.05), (0.96, 0.98), "does not hold"),
        ((0.99, 0.99), (0.99, 1.2), "holds"),
    ],
)
def test_the_least_figures_are_compared(paper: tuple[float, float], ours: tuple[float, float], verdict: str) -> None:
    assert Claim("figure 1", "this over that", paper, ours).verdict == verdict


@pytest.mark.parametrize(
    ("within", "ours", "verdict"),
    [
        ((3.3, 4.1), (3.4, 3.9), "holds"),
        ((3.3, 4.1), (3.2, 3.4), "holds in part"),
        ((3.3, 4.1), (4.0, 5.0), "holds in part"),
        ((3.3, 4.1), (3.0, 3.2), "does not hold"),
        ((95.0, None), (96.0, 200.0), "holds"),
        ((95.0, None), (94.0, 94.5), "does not hold"),
    ],
)
def test_figures_are_near_enough_or_not(
    within: tuple[float, float | None], ours: tuple[float, float], verdict: str
) -> None:
    claim = Claim("table 1", "tokens a second", (3.7, 3.7), ours, within=within)
    assert claim.verdict == verdict and claim.as_json()["within"] == list(within)
