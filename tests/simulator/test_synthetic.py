"""Synthetic traces against recorded ones and against counts by hand.

Would catch draws that hang on more than the seed, a fit whose caches hit otherwise than the recorded run's, scores
that would have chosen other experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.errors import TraceError
from smoe.eval.texts import read_documents
from smoe.models.files import DEMO_FOLDER
from smoe.policy.registry import make_eviction
from smoe.routing import Phase, Routing
from smoe.simulator.replay import replay
from smoe.simulator.synthetic import (
    LEAST_REPETITIVE,
    MOST_REPETITIVE,
    TYPICAL,
    DrawnShape,
    Habits,
    fit,
    moments,
    synthesise,
)
from smoe.trace.file import Trace
from smoe.trace.recorder import recording

STEPS, PROMPT = 160, 7
SMALL = DrawnShape(experts=16, top_k=3, layers=4, steps=30, prompt_tokens=5)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Routing]:
    """The embedded model reads a story token by token: what it wrote itself would be another on another CPU."""
    path = tmp_path_factory.mktemp("synthetic") / "story.trace"
    story, *_ = read_documents(None)
    ids = torch.tensor([AutoTokenizer.from_pretrained(DEMO_FOLDER)(story)["input_ids"][: PROMPT + STEPS]])
    model = from_pretrained("demo", dtype="float32")
    with torch.no_grad(), recording(model, path):
        cache = model(input_ids=ids[:, :PROMPT], use_cache=True).past_key_values
        for position in range(PROMPT, PROMPT + STEPS):
            model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
    model.offload.close()
    return list(Trace(path).routings(with_scores=True))


def test_a_shape_is_what_is_drawn() -> None:
    trace = synthesise(SMALL)
    assert [r.layer for r in trace] == [0, 1, 2, 3] * (1 + SMALL.steps)
    assert [r.phase for r in trace] == [Phase.PREFILL] * 4 + [Phase.DECODE] * 4 * SMALL.steps
    assert all(len(r.top_k_index) == (5 if r.phase is Phase.PREFILL else 1) for r in trace)
    assert all(len({*row}) == 3 and max(row) < 16 for r in trace for row in r.top_k_index)


def test_the_same_seed_is_the_same_trace() -> None:
    assert synthesise(SMALL, seed=3, with_scores=True) == synthesise(SMALL, seed=3, with_scores=True)
    assert synthesise(SMALL, seed=3) != synthesise(SMALL, seed=4)
    unscored = [r._replace(scores=None, weights=None) for r in synthesise(SMALL, seed=3, with_scores=True)]
    assert unscored == synthesise(SMALL, seed=3), "scores cost no draws"


def test_scores_choose_what_is_chosen() -> None:
    for routing in synthesise(SMALL, with_scores=True):
        assert routing.scores is not None and routing.weights is not None
        if routing.phase is Phase.DECODE:
            (scores,), (row,), (weights,) = routing.scores, routing.top_k_index, routing.weights
            assert list(np.argsort(scores)[::-1][:3]) == list(row)
            assert weights == pytest.approx([scores[e] / sum(scores[e] for e in row) for e in row])


def test_moments_by_hand() -> None:
    """Two layers, top-1: layer 0 alternates 0, 1, and layer 1 does what layer 0 did: 0 is followed by 2, 1 by 3."""
    trace = [Routing(layer, Phase.DECODE, 4, [[t % 2 + 2 * layer]]) for t in range(40) for layer in range(2)]
    found = moments(trace, 40)
    assert found.concentration == pytest.approx(0.5) and found.reuse == 0
    assert found.lift == pytest.approx(2.0), "certain behind its partner, every second token elsewhere"
    assert found.gap is None


def test_each_number_moves_its_statistic() -> None:
    shape = DrawnShape(32, 4, 6, 200)
    none = Habits(0.0, 0.0, 0.0, 1.0)
    plain = moments(synthesise(shape, none), 200)
    assert plain.reuse == pytest.approx(4 / 32, abs=0.02) and plain.lift == pytest.approx(1.0, abs=0.15)
    assert moments(synthesise(shape, Habits(1.0, 0.0, 0.0, 1.0)), 200).concentration > plain.concentration + 0.05
    assert moments(synthesise(shape, Habits(0.0, 1.0, 0.0, 1.0)), 200).reuse > plain.reuse + 0.1
    assert moments(synthesise(shape, Habits(0.0, 0.0, 2.0, 1.0)), 200).lift > plain.lift + 0.5


def test_a_fitted_trace_is_missed_as_often_as_the_recorded_one(recorded: Sequence[Routing]) -> None:
    """Within some points of the recorded hit ratio, at four sizes of the cache, and not by chance: the trace without
    habits is further off."""
    habits = fit(recorded, STEPS)
    shape = DrawnShape(64, 8, 12, STEPS, PROMPT)
    drawn, plain = synthesise(shape, habits, seed=1), synthesise(shape, Habits(0.0, 0.0, 0.0, 1.0), seed=1)
    for eviction in ("lru", "lfu"):
        ratios = [
            [
                replay(trace, int(share * 768), 2, make_eviction(eviction)).hit_ratio
                for trace in (recorded, drawn, plain)
            ]
            for share in (0.1, 0.2, 0.4, 0.6)
        ]
        recorded_ratios, near, far = np.array(ratios).T
        assert near == pytest.approx(recorded_ratios, abs=0.05)
        assert np.abs(near - recorded_ratios).sum() < 0.5 * np.abs(far - recorded_ratios).sum()
    wanted, found = moments(recorded, STEPS), moments(drawn, STEPS)
    assert found.concentration == pytest.approx(wanted.concentration, rel=0.15)
    assert found.reuse == pytest.approx(wanted.reuse, rel=0.15)
    assert fit(recorded, 60) == fit(recorded, 60)


def test_the_usual_habits_are_between_the_others() -> None:
    shape = DrawnShape(64, 8, 6, 150, 32)
    hits = [
        replay(synthesise(shape, habits), 115, 2, make_eviction("lfu")).hit_ratio
        for habits in (Habits(0.0, 0.0, 0.0, 1.0), LEAST_REPETITIVE, TYPICAL, MOST_REPETITIVE)
    ]
    assert all(less < more for less, more in pairwise(hits))


def test_too_little_shows_no_habits() -> None:
    with pytest.raises(TraceError, match="too short to learn"):
        fit(synthesise(DrawnShape(8, 2, 2, 1)))
