"""Sharing misses out: the printed algorithm against hand-worked cases, the optimum against all subsets.

Would catch: a greedy that calls itself optimal, a split that loads the unimportant experts, an expert that nobody
serves.
"""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.expert import EXACT
from smoe.policy.load_or_compute import BALANCERS, FLAT, RECENT, Balance, Costs, RecentCosts, optimal, paper
from smoe.policy.plan import HOST, Serve
from smoe.routing import Phase, Routing

SECONDS = st.floats(0.01, 10.0)


@pytest.mark.parametrize(
    ("load", "host", "missing", "loaded"),
    [
        (1.0, 1.0, 4, 2),  # link, CPU, link, CPU
        (3.0, 1.0, 1, 1),  # the link first, though the CPU would be done in a third of the time
        (3.0, 1.0, 5, 2),  # link 3 | CPU 1 2 3 | at 3 the CPU is no longer behind: 4, then the link again: not reached
        (1.0, 3.0, 5, 4),  # link 1 | CPU 3 | link 2 3 | equal: the link again
        (1.0, 1.0, 0, 0),
    ],
)
def test_algorithm_2_by_hand(load: float, host: float, missing: int, loaded: int) -> None:
    assert paper([host] * missing, Costs(load, host)) == loaded


def test_algorithm_2_of_the_first_version_counts_tokens() -> None:
    """Experts for 3, 2, 1, 1 tokens, loads of 2, a CPU second a token: link 2 | CPU 1, 2 | link 4 | nothing is left."""
    assert paper([3.0, 2.0, 1.0, 1.0], Costs(2.0, 1.0)) == 2


@given(st.lists(SECONDS, max_size=6), SECONDS, st.floats(0.0, 10.0))
def test_optimal_is_the_best_of_all_subsets(host: list[float], load: float, under_way: float) -> None:
    """Whichever experts are loaded, not only the first ones: most expensive first is as good as any choice."""
    host = sorted(host, reverse=True)
    costs = Costs(load, 1.0, under_way)

    def seconds(loaded: tuple[int, ...]) -> float:
        link = under_way + len(loaded) * load if loaded else 0.0
        return max(link, sum(seconds for n, seconds in enumerate(host) if n not in loaded))

    chosen = optimal(host, costs)
    best = min(seconds(loaded) for k in range(len(host) + 1) for loaded in combinations(range(len(host)), k))
    assert seconds(tuple(range(chosen))) <= best * (1 + 1e-9)


def test_where_the_printed_algorithm_is_not_optimal() -> None:
    costs = Costs(3.0, 1.0)
    assert (paper([1.0], costs), optimal([1.0], costs)) == (1, 0)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.sampled_from(sorted(BALANCERS)), SECONDS, SECONDS)
def test_everybody_is_served_once_and_the_important_are_loaded(
    tokens: list[int], method: str, load: float, host: float
) -> None:
    serves = [Serve((0, expert, EXACT), tuple(range(count)), True) for expert, count in enumerate(tokens)]
    scores = [[(expert * 7 % 11) / 11 for expert in range(len(tokens))]] * 3
    routing = Routing(0, Phase.DECODE, len(tokens), [[0], [0], [0]], scores)
    loaded, computed = Balance(method, "score", Costs(load, host)).split(serves, routing)
    assert sorted(s.key for s in loaded + computed) == [s.key for s in serves]
    assert all(s.unit == HOST for s in computed)
    assert not any(s.unit == HOST for s in loaded)
    ranks = [scores[0][s.key[1]] for s in loaded + computed]
    assert ranks == sorted(ranks, reverse=True)


def test_tokens_go_before_scores_in_the_first_version() -> None:
    routing = Routing(0, Phase.DECODE, 3, [[0, 1], [2, 1]], [[0.6, 0.3, 0.1], [0.1, 0.3, 0.6]])
    serves = [Serve((0, 0, EXACT), (0,), True), Serve((0, 1, EXACT), (1, 3), True), Serve((0, 2, EXACT), (2,), True)]
    costs = Costs(2.0, 1.0)
    by_tokens = Balance("paper", "tokens", costs).split(serves, routing)[0]
    by_score = Balance("paper", "score", costs).split(serves, routing)[0]
    assert (by_tokens[0].key[1], by_score[0].key[1]) == (1, 0)


def test_costs_are_the_mean_of_the_last_measurements() -> None:
    recent = RecentCosts()
    assert recent.costs(0.0).load == recent.costs(0.0).host, "nothing is known: both ways are alike"
    for n in range(2 * RECENT):
        recent.note_load(float(n))
    recent.note_host(5.0)
    expected = sum(range(RECENT, 2 * RECENT)) / RECENT
    assert recent.costs(0.5) == Costs(expected, 5.0, 0.5 * expected, 5.0 / FLAT)
    recent.note_token(0.25)
    assert recent.costs(0.5) == Costs(expected, 5.0, 0.5 * expected, 0.25)
