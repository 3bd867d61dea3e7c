"""Budgets on a simulated run of random misses, and against whoever wants all at once.

Would catch: a rate that settles elsewhere than the best fixed one, one that is stuck because the limit makes what is
spent look right, nats saved up without end, a time that is met by giving away more quality than it takes.
"""

from __future__ import annotations

import random
from functools import cache
from math import exp, inf, log, nan, sqrt
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.errors import ConfigError
from smoe.policy.answers import AnswerCosts, choose
from smoe.policy.missing_experts import Missing, Route
from smoe.policy.prices import LayerPrices
from smoe.policy.quality_budget import BURST_TOKENS, RANGE, QualityBudget, TimeBudget, nats_of_perplexity

PRICES, COSTS = LayerPrices(1e-4, 2e-3, 3e-3), AnswerCosts(1e-3, 2.8e-4)
LAYERS, TOP_K, TOKENS = 6, 8, 1200
NATS = 7.5e-5
"""A token: what a rate of some 10 seconds a nat spends."""


@cache
def tokens() -> list[list[list[Missing]]]:
    """For every token and layer 0 to 4 of 8 experts missing, weights falling with the rank."""
    chance = random.Random(0)
    return [[layer(chance) for _ in range(LAYERS)] for _ in range(TOKENS)]


def layer(chance: random.Random) -> list[Missing]:
    weights = sorted((1 / (rank + 1) * chance.uniform(0.7, 1.3) for rank in range(TOP_K)), reverse=True)
    missing = []
    for choice in chance.sample(range(TOP_K), chance.randint(0, 4)):
        instead = 100 + choice if chance.random() < 0.8 else None
        route = Route(0, choice, weights[choice] / sum(weights), instead, chance.uniform(0.0, 0.5))
        missing.append(Missing(choice, [route], chance.random() < 0.2))
    return missing


def at_rate(rate: float, since: int = 0) -> tuple[float, float]:
    """(nats, seconds) a token, means over the run from that token on."""
    chosen = [choose(missing, COSTS, PRICES, rate, TOP_K) for token in tokens()[since:] for missing in token]
    return sum(c.nats for c in chosen) / (TOKENS - since), sum(c.seconds for c in chosen) / (TOKENS - since)


@cache
def best_rate(nats: float = NATS) -> float:
    """The lowest fixed rate that stays within the nats, by bisection."""
    low, high = 0.1, 1000.0
    for _ in range(16):
        middle = sqrt(low * high)
        low, high = (middle, high) if at_rate(middle)[0] > nats else (low, middle)
    return high


def highest_rate(seconds: float, since: int) -> float:
    """The highest fixed rate that takes no longer on the tokens from that one on, by bisection."""
    low, high = 0.1, 1000.0
    for _ in range(16):
        middle = sqrt(low * high)
        low, high = (low, middle) if at_rate(middle, since)[1] > seconds else (middle, high)
    return low


def run(budget: QualityBudget) -> tuple[list[float], float, float]:
    """(the rate after every token, nats and seconds in all)."""
    rates, nats, seconds = [], 0.0, 0.0
    for n, token in enumerate(tokens(), start=1):
        budget.begin_step(1)
        for missing in token:
            chosen = choose(missing, COSTS, PRICES, budget.rate, TOP_K, budget.limit)
            budget.spend(chosen.nats, chosen.wanted_nats)
            nats, seconds = nats + chosen.nats, seconds + chosen.seconds
            assert nats <= (n + BURST_TOKENS) * budget.nats_per_token * (1 + 1e-9)
        rates.append(budget.rate)
    return rates, nats, seconds


@pytest.mark.parametrize("first", [0.05, 1.0, 20.0])
def test_the_rate_settles_where_the_best_fixed_one_is(first: float) -> None:
    rates, nats, _ = run(QualityBudget(NATS, first * best_rate()))
    settled = rates[TOKENS // 2 :]
    assert mean(settled) == pytest.approx(best_rate(), rel=0.05)
    assert all(abs(log(rate / best_rate())) < 0.12 for rate in settled)
    assert nats >= 0.95 * TOKENS * NATS, "what may be spent is spent"


def test_a_larger_budget_takes_less_time() -> None:
    runs = [run(QualityBudget(nats, best_rate())) for nats in (0.0, NATS / 2, NATS, 2 * NATS)]
    assert runs[0][0] == [inf] * TOKENS
    assert runs[0][1] == 0.0
    assert [seconds for _, _, seconds in runs] == sorted((seconds for _, _, seconds in runs), reverse=True)


def test_the_same_run_gives_the_same_rates() -> None:
    assert run(QualityBudget(NATS, 3.0)) == run(QualityBudget(NATS, 3.0))


@given(
    steps=st.lists(st.tuples(st.integers(1, 64), st.lists(st.floats(0.0, 50.0), max_size=4)), max_size=60),
    first=st.floats(0.01, 100.0),
)
def test_the_bound_holds_whatever_is_wanted(steps: list[tuple[int, list[float]]], first: float) -> None:
    """Someone who does not look at the rate, and takes whatever there is."""
    budget, spent, so_far = QualityBudget(1.0, first), 0.0, 0
    for step_tokens, wanted in steps:
        budget.begin_step(step_tokens)
        so_far += step_tokens
        for nats in wanted:
            taken = min(nats, budget.limit)
            budget.spend(taken, nats)
            spent += taken
        assert spent <= so_far + BURST_TOKENS + 1e-9
        assert first / RANGE * 0.999 <= budget.rate


def test_saving_up_ends_with_the_burst() -> None:
    budget = QualityBudget(1.0, 1.0)
    for _ in range(1000):
        budget.begin_step(1)
    assert budget.limit == BURST_TOKENS + 1


def test_too_much_makes_dearer_although_the_limit_holds_it() -> None:
    budget = QualityBudget(1.0, 1.0)
    rates = []
    for _ in range(300):
        budget.begin_step(1)
        budget.spend(min(2.0, budget.limit), 2.0)
        rates.append(budget.rate)
    assert rates == sorted(rates) and rates[-1] > 10.0


def test_a_rate_out_of_range_is_exact_and_comes_back() -> None:
    budget = QualityBudget(1.0, 1.0)
    for _ in range(10_000):
        budget.begin_step(1)
        budget.spend(min(4.0, budget.limit), 4.0)
    assert budget.rate == inf
    for _ in range(2):
        budget.begin_step(1)
    budget.begin_step(1)
    assert budget.rate < RANGE


REST = 0.02
"""Seconds of a token in which nothing is waited for."""


@pytest.mark.parametrize("first", [0.1, 10.0])
def test_the_time_is_met_at_the_highest_rate(first: float) -> None:
    """Asked for is the time that `best_rate` takes, beside computing that is noisy."""
    chance = random.Random(1)
    asked = at_rate(best_rate())[1]
    budget = TimeBudget(REST + asked, first * best_rate())
    rates = []
    for token in tokens():
        waited = sum(choose(missing, COSTS, PRICES, budget.rate, TOP_K).seconds for missing in token)
        budget.note(REST * chance.uniform(0.95, 1.05) + waited, waited)
        rates.append(budget.rate)
    assert mean(rates[TOKENS // 2 :]) == pytest.approx(highest_rate(asked, TOKENS // 2), rel=0.05)


def test_more_time_than_exact_answers_take_gives_exact_ones() -> None:
    budget = TimeBudget(1.0, 1.0)
    for _ in range(4000):
        budget.note(0.1, 0.05)
    assert budget.rate == inf


def test_a_time_out_of_reach_gives_the_cheapest_answers() -> None:
    budget = TimeBudget(0.01, 1.0)
    for _ in range(4000):
        budget.note(0.1, 0.05)
    assert budget.rate == pytest.approx(1 / RANGE)


def test_one_percent() -> None:
    assert exp(nats_of_perplexity(0.01)) == pytest.approx(1.01)
    assert nats_of_perplexity(0.0) == 0.0


@pytest.mark.parametrize("given", [-0.01, 1.5, nan, inf])
def test_perplexities_that_make_no_sense(given: float) -> None:
    with pytest.raises(ConfigError, match=r"max_perplexity_increase.*from 0 to 1"):
        nats_of_perplexity(given)


@pytest.mark.parametrize("given", [-1.0, nan, inf])
def test_budgets_that_make_no_sense(given: float) -> None:
    with pytest.raises(ConfigError, match="nats_per_token"):
        QualityBudget(given, 1.0)
    with pytest.raises(ConfigError, match="tpot"):
        TimeBudget(given, 1.0)
    with pytest.raises(ConfigError, match="rate"):
        QualityBudget(1.0, given)
    with pytest.raises(ConfigError, match="rate"):
        TimeBudget(1.0, given)


def test_no_time_at_all_and_a_rate_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="tpot"):
        TimeBudget(0.0, 1.0)
    with pytest.raises(ConfigError, match="rate"):
        QualityBudget(1.0, 0.0)
