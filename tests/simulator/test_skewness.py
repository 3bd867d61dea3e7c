"""The one number of a run's routing, found again from hits.

Would catch a search in the wrong direction, or one that looks at another cache than the run had.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from smoe.policy.eviction.lru import LRU
from smoe.simulator.replay import replay
from smoe.simulator.skewness import skew_of
from smoe.simulator.synthetic import TYPICAL, DrawnShape, synthesise

SHAPE = DrawnShape(experts=32, top_k=4, layers=4, steps=60, prompt_tokens=16)
found_by = partial(skew_of, shape=SHAPE, habits=TYPICAL, staging_slots=2, eviction=LRU)


def hits(skew: float, slots: int, seed: int = 0) -> float:
    trace = synthesise(SHAPE, replace(TYPICAL, skew=skew * TYPICAL.skew), seed)
    return replay(trace, slots, 2, LRU()).hit_ratio


@pytest.mark.parametrize("skew", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("slots", [16, 32, 64])
def test_the_skew_that_a_trace_was_drawn_with_is_found(skew: float, slots: int) -> None:
    assert found_by(hits(skew, slots), slots=slots) == pytest.approx(skew, rel=0.05)


@pytest.mark.parametrize("skew", [0.5, 1.0, 2.0])
def test_of_other_draws_it_is_found_within_what_chance_makes_of_240_routings(skew: float) -> None:
    assert found_by(hits(skew, 64, seed=1), slots=64) == pytest.approx(skew, rel=0.25)


def test_what_one_size_shows_holds_for_others() -> None:
    shown = found_by(hits(2.0, 32, seed=1), slots=32)
    assert shown is not None and hits(shown, 64) == pytest.approx(hits(2.0, 64, seed=1), abs=0.05)


def test_what_no_skew_explains_shows_nothing() -> None:
    """A cache of one token's choice hits alike whatever the habits; a single stray hit would decide."""
    assert found_by(0.0, slots=16) is None
    assert found_by(0.999, slots=16) is None
    assert found_by(0.003, slots=4) is None


def test_a_cache_that_misses_nothing_shows_nothing() -> None:
    assert found_by(0.9, slots=128) is None and found_by(1.0, slots=64) is None
