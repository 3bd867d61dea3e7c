"""Times of a replay: what was counted, loads as long as they were waited for, and what an eviction itself takes.

Would catch: seconds divided by the wrong count, a search for the load that ends elsewhere, an eviction that chooses
otherwise when it is watched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from smoe.eval import replay_times
from smoe.eval.replay_times import TimedEviction, as_waited, on_clock, times_of
from smoe.metrics import Counters
from smoe.policy.registry import make_eviction
from smoe.routing import Phase, Routing
from smoe.simulator.replay import replay
from smoe.simulator.virtual_clock import StepTimes

Open = Callable[..., PreTrainedModel]
LAYERS, TOKENS = 4, 60
TRACE = [
    Routing(layer, Phase.DECODE, 8, [[(3 * token * token + layer) % 8, (token + 5 * layer + 1) % 8]])
    for token in range(TOKENS)
    for layer in range(LAYERS)
]
TIMES = StepTimes(load=0.002, expert=lambda rows: 0.001 * rows, layer=lambda tokens: 0.003, deciding=0.5)


@pytest.fixture
def engine(toy: Callable[..., Path], open_model: Open) -> Any:
    return open_model(toy("qwen2_moe"), "fifth", eviction="lru", prefetch="none").offload


def test_times_are_what_was_counted(engine: Any) -> None:
    counted = Counters(
        forward_passes=10, loads=15, prefetches=5, read_busy_seconds=4.0, compute_seconds=3.0, decode_uses=30,
        forward_seconds=20.0, wait_seconds=1.0, plan_seconds=2.0,
    )  # fmt: skip
    times, layers = times_of(engine, counted), len(engine.store.layers)
    assert (times.load, times.expert(1), times.expert(3)) == pytest.approx((0.2, 0.1, 0.3))
    assert (times.layer(1), times.deciding) == pytest.approx((14.0 / (10 * layers), 0.2 / layers))


@pytest.mark.parametrize("real", [0.0004, 0.002, 0.05])
def test_a_load_takes_what_makes_the_replay_wait_as_long(engine: Any, real: float) -> None:
    """Whatever the reads alone took: shorter, as long, or longer."""

    def total(load: float) -> float:
        timed, _ = replay_times._replayed(engine, TRACE, engine.eviction_settings, replace(TIMES, load=load), None)
        return sum(timed.step_seconds)

    waited = total(real) - total(0.0)
    found = as_waited(engine, TRACE, TIMES, waited)
    assert total(found.load) - total(0.0) == pytest.approx(waited, rel=0.01, abs=1e-3)
    assert found.load == pytest.approx(real, rel=0.01) or waited == 0.0
    assert 0 < found.deciding < TIMES.deciding, "the eviction's part is out"


@pytest.mark.parametrize("name", ["lru", "auto", "learned"])
def test_a_watched_eviction_chooses_as_ever(name: str) -> None:
    watched = TimedEviction(make_eviction(name))
    assert replay(TRACE, 9, 2, watched) == replay(TRACE, 9, 2, make_eviction(name))
    assert watched.seconds > 0 and watched.name == name


def test_what_an_eviction_takes_counts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = engine.eviction_settings
    monkeypatch.setattr(replay_times.time, "thread_time", lambda: 0.0)
    without = on_clock(engine, TRACE, settings, TIMES, None)
    ticks = iter(range(10**6))
    monkeypatch.setattr(replay_times.time, "thread_time", lambda: float(next(ticks)))
    asked = len(TRACE)  # once for every layer heard; questions come on top
    assert on_clock(engine, TRACE, settings, TIMES, None) >= without + asked / TOKENS
