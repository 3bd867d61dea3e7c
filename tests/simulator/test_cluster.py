"""A cluster of our own on any tokens: what must hold whoever computes what.

Would catch: an answer that is lost, seconds that nothing accounts for, an expert loaded twice while there is room, a
draft's wrong token that is waited for, times that hang on luck.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from smoe.policy.placement import PLACEMENT
from smoe.simulator.cluster import DecodedToken, SimulatedCluster, SimulatedRun, Wire, decode
from smoe.simulator.cluster_draft import DraftTimes
from smoe.simulator.cluster_machine import WorkerTimes

LAYERS, EXPERTS, CHOSEN, TOKENS = 5, 8, 2, 30
DRAFTS = [None, DraftTimes(0.3), DraftTimes(0.3, is_early=True)]


def drawn(seed: int, recall: float = 0.8) -> list[DecodedToken]:
    """Tokens whose experts are named rightly as often."""
    chance = random.Random(seed)

    def token() -> DecodedToken:
        chosen = [chance.sample(range(EXPERTS), CHOSEN) for _ in range(LAYERS)]
        any_of = [chance.sample(range(EXPERTS), CHOSEN) for _ in range(LAYERS)]
        named = [each if chance.random() < recall else other for each, other in zip(chosen, any_of, strict=True)]
        return DecodedToken(chosen, named, chance.random() < recall, any_of)

    return [token() for _ in range(TOKENS)]


def cluster(placement: str, workers: int = 4, slots: int = 6, **more: object) -> SimulatedCluster:
    machine = WorkerTimes(2.0, 0.25, slots, away=0.1)
    here = replace(machine, slots=CHOSEN) if placement == "finish" else None
    found = SimulatedCluster(1.0, Wire(100.0, 0.05, 0.02), 1.0, [machine] * workers, placement, here, spread=0.05)
    return replace(found, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("placement", PLACEMENT)
@pytest.mark.parametrize(("workers", "slots"), [(1, 1), (1, 6), (3, 1), (4, 3)])
def test_every_token_ends_and_every_second_is_accounted_for(
    placement: str, draft: DraftTimes | None, workers: int, slots: int, seed: int
) -> None:
    tokens = drawn(seed)
    run = decode(cluster(placement, workers, slots, draft=draft), tokens)
    assert len(run.token_seconds) == len(run.waits) == TOKENS
    for seconds, waits in zip(run.token_seconds, run.waits, strict=True):
        assert sum(waits) == pytest.approx(seconds) and waits.main == LAYERS * 1.0
        assert min(waits) >= -1e-9
    again = decode(cluster(placement, workers, slots, draft=draft), tokens)
    assert again.token_seconds == run.token_seconds


def distinct(tokens: list[DecodedToken]) -> int:
    return len({(layer, expert) for token in tokens for layer, of in enumerate(token.chosen) for expert in of})


@pytest.mark.parametrize("placement", PLACEMENT)
def test_with_room_for_all_nobody_loads_anything_twice(placement: str) -> None:
    tokens = [DecodedToken(token.chosen) for token in drawn(0)]
    alone, together = (
        decode(cluster(placement, workers, slots=LAYERS * EXPERTS, here=None), tokens) for workers in (1, 4)
    )
    assert alone.loads_since(0) == (distinct(tokens), 0)
    assert distinct(tokens) <= together.loads_since(0)[0] <= 4 * distinct(tokens)
    assert max(map(len, together.loads.values())) <= distinct(tokens)


def waited(run: SimulatedRun) -> float:
    return sum(waits.loads for waits in run.waits)


@pytest.mark.parametrize("placement", PLACEMENT)
def test_a_draft_that_is_right_saves_waiting_for_loads(placement: str) -> None:
    tokens = drawn(1, recall=1.0)
    named, *with_draft = (decode(cluster(placement, here=None, draft=draft), tokens) for draft in DRAFTS)
    blind = decode(cluster(placement, here=None), [DecodedToken(token.chosen) for token in tokens])
    assert waited(with_draft[-1]) < waited(named) < waited(blind), "main names the next layer alone"
    assert all(waited(run) < waited(blind) for run in with_draft)


def test_what_main_would_forget_is_left_to_workers() -> None:
    """Main has two slots and no wire before it, and would be done first; what workers load stays there."""
    run = decode(cluster("finish", workers=2, slots=LAYERS * EXPERTS), drawn(2))
    there, here = run.loads_since(TOKENS // 2)
    assert here <= there + 2, "once workers have kept what they loaded, coordinator loads hardly anything"
