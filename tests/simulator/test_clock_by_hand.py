"""The virtual clock on traces so small that every second can be written down, and what it must keep on any.

Would catch a load that nobody pays for, two loads on the link at once, computing that does not hide reading.
"""

from __future__ import annotations

import pytest

from smoe.policy.registry import make_eviction
from smoe.routing import Phase, Routing
from smoe.simulator.foresight import Foresight
from smoe.simulator.synthetic import DrawnShape, synthesise
from smoe.simulator.virtual_clock import StepTimes, Timed, replay_on_clock

LAYER = 1.0


def steps(rows: list[list[int]], load: float, expert: float, slots: int = 8, host: float | None = None) -> list[float]:
    """Seconds of the decode steps of one layer of eight experts."""
    trace = [Routing(0, Phase.DECODE, 8, [row]) for row in rows]
    on_host = None if host is None else lambda rows: host * rows
    times = StepTimes(load, lambda rows: expert * rows, lambda tokens: LAYER, on_host)
    balance = None if host is None else "optimal"
    return replay_on_clock(trace, slots, 2, make_eviction("lru"), times, balance=balance).step_seconds


def test_one_miss_then_a_hit() -> None:
    assert steps([[3], [3]], load=4.0, expert=0.5) == pytest.approx([LAYER + 4.0 + 0.5, LAYER + 0.5])


def test_a_load_behind_residents_that_take_as_long_costs_nothing() -> None:
    first, second = steps([[0, 1], [0, 1, 2]], load=2.0, expert=1.0)
    assert first == pytest.approx(LAYER + 2.0 + 2.0 + 1.0)
    assert second == pytest.approx(LAYER + 2 * 1.0 + 1.0), "two residents, meanwhile the load, then the third"


def test_bound_by_the_link_loads_are_one_after_the_other() -> None:
    (seconds,) = steps([[0, 1, 2, 3]], load=4.0, expert=0.5)
    assert seconds == pytest.approx(LAYER + 4 * 4.0 + 0.5)


def test_bound_by_computing_only_the_first_load_is_waited_for() -> None:
    (seconds,) = steps([[0, 1, 2, 3]], load=0.5, expert=2.0)
    assert seconds == pytest.approx(LAYER + 0.5 + 4 * 2.0)


def test_who_comes_late_is_computed_alone() -> None:
    """Three residents in one piece, then the fourth, which has waited; of a prompt all are computed alone anyhow."""
    trace = [Routing(0, Phase.DECODE, 8, [row]) for row in ([0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3])]
    times = StepTimes(4.0, lambda rows: 0.5 * rows, lambda tokens: LAYER, alone=3.0)
    timed = replay_on_clock(trace, 8, 2, make_eviction("lru"), times)
    assert timed.step_seconds == pytest.approx([LAYER + 3 * 4.0 + 1.5, LAYER + 4.0 + 1.5, LAYER + 4 * 0.5])
    assert timed.computed_alone == 3 + 1
    prompt = [Routing(0, Phase.PREFILL, 8, [[0, 1]])]
    timed = replay_on_clock(prompt, 8, 2, make_eviction("lru"), times)
    assert timed.prefill_seconds == pytest.approx(LAYER + 8.0 + 0.5)


def test_a_prefetch_in_chunks_takes_longer() -> None:
    """The second layer's expert is guessed while the first runs; nobody waited for it when it was asked for."""
    trace = [Routing(layer, Phase.DECODE, 8, [[layer]]) for layer in (0, 1)]
    times = StepTimes(4.0, lambda rows: 0.5 * rows, lambda tokens: LAYER, in_chunks=1.5)
    timed = replay_on_clock(trace, 8, 3, make_eviction("lru"), times, predictor=Foresight(trace))
    assert timed.step_seconds == pytest.approx([LAYER + 4.0 + 1.5 * 4.0 + 0.5])
    assert timed.link_seconds == pytest.approx(2.5 * 4.0)


def test_the_cpu_takes_its_share() -> None:
    """Two experts, a load of 4 and 4 on the CPU: one each, at the same time."""
    (seconds,) = steps([[0, 1]], load=4.0, expert=0.5, host=4.0)
    assert seconds == pytest.approx(LAYER + 4.0 + 0.5)


@pytest.mark.parametrize("eviction", ["auto", "lru", "lfu", "score"])
@pytest.mark.parametrize("recall", [None, 0.0, 0.7, 1.0])
@pytest.mark.parametrize("slots", [4, 20, 60])
def test_what_the_link_moves_is_what_was_loaded(eviction: str, recall: float | None, slots: int) -> None:
    """All loads that were asked for, and a prefetch at most once; never two at the same time."""
    trace = synthesise(DrawnShape(experts=16, top_k=4, layers=4, steps=60), with_scores=True)
    times = StepTimes(0.7, lambda rows: 0.1 * rows, lambda tokens: LAYER)
    predictor = None if recall is None else Foresight(trace, recall)
    found: Timed = replay_on_clock(trace, slots, 6, make_eviction(eviction), times, predictor=predictor)
    elapsed = sum(found.step_seconds)
    moved = found.link_seconds / 0.7
    assert found.link_seconds <= elapsed + 0.7, "the last prefetch may still run"
    if predictor is None:
        assert moved == pytest.approx(found.loads)
    assert found.loads - 1e-6 <= moved <= found.loads + found.prefetches + 1e-6
    assert found.prefetches_used <= found.prefetches
    assert elapsed >= 60 * 4 * (LAYER + 4 * 0.1) - 1e-6, "the device computes all of it, one after the other"
    again = replay_on_clock(
        trace, slots, 6, make_eviction(eviction), times, predictor=None if recall is None else Foresight(trace, recall)
    )
    assert again == found, "to the bit"
