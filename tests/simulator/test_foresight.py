"""Guesses that are right as often as they should be, and wrong as a router would be.

Would catch errors that are spread over all experts where they should be near, a recall that is not the one asked for,
guesses of one layer named for another.
"""

from __future__ import annotations

from statistics import mean

import pytest

from smoe.policy.prediction import Grading, Sight
from smoe.routing import Phase, Routing
from smoe.simulator.foresight import Foresight, blurred
from smoe.simulator.synthetic import DrawnShape, synthesise

TRACE = synthesise(DrawnShape(experts=32, top_k=4, layers=6, steps=40, prompt_tokens=8), with_scores=True)


def named(recall: float, errs_nearby: bool, alpha: float = 0.0) -> list[tuple[Routing, list[int]]]:
    """Each routing of a decode step that something was named for, and what."""
    predictor, found = Foresight(TRACE, recall, guesses=blurred(TRACE, recall) if errs_nearby else None), []
    predictor.grade_by(Grading(alpha))
    for routing in TRACE:
        predictor.observe(routing)
        if routing.phase is Phase.DECODE:
            for prediction in predictor.predict(Sight(routing.layer, None)):
                coming = TRACE[TRACE.index(routing) + 1]
                assert prediction.layer == coming.layer
                found.append((coming, list(prediction.experts)))
    return found


def rank(routing: Routing, expert: int) -> int:
    assert routing.scores is not None
    return sorted(range(32), key=lambda e: -routing.scores[0][e]).index(expert)  # type: ignore[index]


@pytest.mark.parametrize("recall", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("errs_nearby", [False, True])
def test_the_recall_is_the_one_asked_for(recall: float, errs_nearby: bool) -> None:
    guesses = named(recall, errs_nearby)
    assert len(guesses) == 40 * 5
    assert mean(len(set(row) & set(coming.top_k_index[0])) / 4 for coming, row in guesses) == pytest.approx(
        recall, abs=0.06
    )


def test_who_ranks_just_behind_is_named_in_the_place_of_who_ranks_just_before() -> None:
    """Of four chosen of 32, the mean rank of a wrong guess at random is 17.5; and the first is missed less often than
    the last."""
    anywhere, near = (
        [rank(coming, expert) for coming, row in named(0.7, nearby) for expert in row] for nearby in (False, True)
    )
    wrong_anywhere, wrong_near = ([r for r in ranks if r >= 4] for ranks in (anywhere, near))
    assert mean(wrong_anywhere) == pytest.approx(17.5, abs=2) and mean(wrong_near) < 10
    assert near.count(0) > 1.2 * near.count(3)


def test_only_what_would_be_top_score_is_worth_a_load() -> None:
    all_of_them, top = (sum(len(row) for _, row in named(0.7, True, alpha)) for alpha in (0.0, 0.5))
    assert top < all_of_them


def test_who_knows_everything_errs_nowhere() -> None:
    for coming, row in named(1.0, True):
        assert sorted(row) == sorted(coming.top_k_index[0])
