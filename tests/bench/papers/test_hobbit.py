"""HOBBIT's settings: what must come out of them whatever the routing.

Would catch: low copies that take no room, or no time, a prefetch that brings own copies where low ones will do, shares
of choices other than the paper's.
"""

from __future__ import annotations

import pytest

from bench.papers import hobbit
from bench.papers.claims import Reproduction
from bench.papers.hobbit import MACHINES, MODELS, RUNS, switches_of
from smoe.policy.importance import graded
from smoe.routing import Phase
from smoe.simulator.synthetic import DrawnShape, synthesise
from tests.bench.papers.shorter import reproduced


@pytest.fixture(scope="module")
def found() -> Reproduction:
    return reproduced(hobbit, len(MODELS), NEW_TOKENS=24, SETTINGS=[(model, MACHINES[0]) for model in MODELS])


def test_every_system_fits_the_machine_and_takes_time(found: Reproduction) -> None:
    assert len(found.settings) == len(MODELS) * len(RUNS)
    for setting in found.settings:
        assert 0.9 * MACHINES[0].room_bytes < setting.memory_bytes <= MACHINES[0].room_bytes, setting
        assert setting.seconds_per_token > 0 and setting.ttft_seconds > 0


def test_thresholds_give_the_papers_shares() -> None:
    trace = synthesise(DrawnShape(16, 4, 8, 64), with_scores=True)
    switches, counts = switches_of(trace), [0, 0, 0]
    for routing in trace:
        if routing.phase is Phase.DECODE:
            asked, skip = graded(routing, switches.thresholds)
            low = len(set(asked.low) - skip)
            counts = [counts[0] + 4 - low - len(skip), counts[1] + low, counts[2] + len(skip)]
    shares = [count / sum(counts) for count in counts]
    assert shares == pytest.approx([0.67, 0.30, 0.03], abs=0.01)


def test_what_must_be_faster_is(found: Reproduction) -> None:
    by_system = {(setting.name, setting.system): setting.seconds_per_token for setting in found.settings}
    for model in MODELS:
        where = f"{model.name}, {MACHINES[0].name}"
        assert by_system[where, "hobbit, no prefetch"] < by_system[where, "hobbit, own copies, no prefetch"]
        assert by_system[where, "hobbit"] < by_system[where, "hobbit, own copies alone"]
        assert by_system[where, "hobbit beside the CPU"] < by_system[where, "hobbit, no prefetch"]


def test_claims_are_named_by_their_figures(found: Reproduction) -> None:
    assert {claim.where for claim in found.claims} == {f"figure {number}" for number in (14, 15, 16, 17, 18)}
    assert any("synthetic" in remark for remark in found.remarks)
