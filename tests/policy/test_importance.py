"""Unimportance and what it asks for: tokens worked by hand, and plain loops over generated ones.

Would catch: an expert that counts its own weight, equal weights that both go first, a row of a batch that another one's
low copy serves, padding that asks for something.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.policy.importance import ALL_IMPORTANT, Thresholds, graded, least_unimportance, scaled, unimportance, without
from smoe.routing import Phase, Routing

EXPERTS = 8
NOISE = 1e-9
"""Sums in another order; far below what the thresholds leave to rounding."""


def step(rows: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> Routing:
    return Routing(0, Phase.DECODE, EXPERTS, rows, weights=weights)


def asks(rows: Sequence[Sequence[int]], weights: Sequence[Sequence[float]], low: float, skip: float = 1.0) -> set[int]:
    """What asks for low copies only."""
    return set(graded(step(rows, weights), Thresholds(low, skip))[0].low)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], [0, 0.5, 0.8, 0.95]),
        ([0.05, 0.5, 0.15, 0.3], [0.95, 0, 0.8, 0.5]),
        ([0.25, 0.25, 0.25, 0.25], [0, 0.25, 0.5, 0.75]),  # the first of equals counts as the larger
        ([0.2, 0.4, 0.4], [0.8, 0, 0.4]),
        ([1.0], [0]),
        ([0.0, 1.0], [1.0, 0]),
        ([], []),
    ],
)
def test_tokens_by_hand(weights: list[float], expected: list[float]) -> None:
    assert unimportance(weights) == pytest.approx(expected, abs=NOISE)


def test_what_a_token_asks_for() -> None:
    """The paper's example: the third is low beyond 0.6, the fourth left out beyond 0.9."""
    routing, skip = graded(step([[3, 0, 5, 1]], [[0.5, 0.3, 0.15, 0.05]]), Thresholds(0.6, 0.9))
    assert routing.low == {5, 1} and skip == {1}
    assert routing.top_k_index == [[3, 0, 5, 1]], "who is served is decided when it is known who is here"


def test_the_only_expert_of_a_token_is_always_important() -> None:
    assert asks([[4]], [[1.0]], low=0.0, skip=0.0) == set()


def test_a_threshold_is_met_by_what_equals_it() -> None:
    """Above it only, whatever rounding has added: 0.1 + 0.2 is more than 0.3 to a computer."""
    rows, weights = [[0, 1, 2]], [[0.7, 0.2, 0.1]]
    assert asks(rows, weights, 0.7) == {2} and asks(rows, weights, 0.69) == {1, 2} and asks(rows, weights, 0.9) == set()
    assert 0.2 + 0.1 > 0.3 and asks([[0, 1, 2]], [[0.2, 0.1, 0.1]], 0.3) == set()


def test_equal_thresholds_leave_no_low_copies() -> None:
    routing, skip = graded(step([[0, 1, 2]], [[0.5, 0.3, 0.2]]), Thresholds(0.4, 0.4))
    assert routing.low == skip == {1, 2}, "what would be low is left out"


@pytest.mark.parametrize("weights", [[0.6, 0.3, 0.1], [1.0, 0.0, 0.0]])
def test_nothing_is_beyond_1(weights: list[float]) -> None:
    routing, skip = graded(step([[0, 1, 2]], [weights]), ALL_IMPORTANT)
    assert not routing.low and not skip


def test_a_batch_gives_what_its_most_demanding_row_asks() -> None:
    rows, weights = [[0, 1, 2], [2, 3, 1]], [[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]]
    assert asks(rows, weights, 0.55) == {1}, "expert 2 is the second row's first, 1 is last in one and 0.6 in the other"
    assert asks(rows[:1], weights[:1], 0.55) == {1, 2}
    assert least_unimportance(step(rows, weights)) == pytest.approx({0: 0, 1: 0.6, 2: 0, 3: 0.5})


def test_padding_asks_for_nothing() -> None:
    none = [EXPERTS] * 2
    assert asks([none, [1, 2], none], [[0.5, 0.5], [0.9, 0.1], [0.0, 0.0]], 0.5) == {2}
    assert least_unimportance(step([none], [[0.5, 0.5]])) == {}


def test_without_leaves_the_other_routes_where_they_are() -> None:
    routing = without(step([[0, 1], [1, 2]], [[0.5, 0.5]] * 2), frozenset({1}))
    assert routing.top_k_index == [[0, EXPERTS], [EXPERTS, 2]]


def test_rows_are_scaled_to_1_and_zeros_stay() -> None:
    assert scaled([[2.0, 6.0], [0.0, 0.0], [0.25, 0.75]]) == [[0.25, 0.75], [0.0, 0.0], [0.25, 0.75]]


@st.composite
def weighed_steps(draw: st.DrawFn) -> Routing:
    """One to five rows of the same K, some of them padding, with weights of which many are equal."""
    width = draw(st.integers(1, 4))
    chosen = st.lists(st.integers(0, EXPERTS - 1), min_size=width, max_size=width, unique=True)
    rows = draw(st.lists(st.one_of(chosen, st.just([EXPERTS] * width)), min_size=1, max_size=5))
    parts = st.lists(st.integers(1, 6), min_size=width, max_size=width)
    return step(rows, scaled([draw(parts) for _ in rows]))


def by_counting(routing: Routing, threshold: float) -> set[int]:
    """Experts for which every row that chose them has larger weights, or equal ones before, of more than `threshold`
    together."""
    assert routing.weights is not None
    wanted, enough = set(), set()
    for row, weights in zip(routing.top_k_index, routing.weights, strict=True):
        for place, expert in enumerate(row):
            if expert == EXPERTS:
                continue
            before = 0.0
            for other, weight in enumerate(weights):
                if weight > weights[place] or (weight == weights[place] and other < place):
                    before += weight
            wanted.add(expert)
            if before <= threshold + 1e-6:
                enough.add(expert)
    return wanted - enough


@given(routing=weighed_steps(), bounds=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_against_plain_counting(routing: Routing, bounds: tuple[int, int]) -> None:
    low, skip = sorted(bound / 12 for bound in bounds)
    found, left_out = graded(routing, Thresholds(low, skip))
    assert found.low == by_counting(routing, low)
    assert left_out == by_counting(routing, skip)
    assert found._replace(low=frozenset()) == routing
    first = {row[max(range(len(row)), key=lambda k: (weights[k], -k))] for row, weights in _rows(routing)}
    assert not first & found.low, "the first expert of a token is always important"


def _rows(routing: Routing) -> list[tuple[Sequence[int], Sequence[float]]]:
    assert routing.weights is not None
    pairs = zip(routing.top_k_index, routing.weights, strict=True)
    return [(row, weights) for row, weights in pairs if row[0] != EXPERTS]
