"""What a run has shown, from the engine that made it.

Would catch prefetches that are taken for a cache's own hits, a run with substitutes that teaches how routers choose,
another cache simulated than the run had.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smoe import from_pretrained
from smoe.config import EngineConfig
from smoe.metrics import Counters
from smoe.report.hindsight import _beginning_shown, _simulated, look_back, shown_by
from smoe.report.pace import LEAST_BEGINNING, UNKNOWN, Access, Pace
from smoe.runtime.engine import Engine

PROMPT, STEPS = 8, 20


def decoded(**switches: Any) -> tuple[Engine, Counters]:
    """The embedded model's engine, and what was counted in decode steps of one sequence."""
    model = from_pretrained("demo", context_tokens=64, resident_share=0.25, **switches)
    engine: Engine = model.offload  # type: ignore[assignment]
    with engine, torch.no_grad():
        cache = engine.new_cache(1)
        rows = torch.arange(5, 5 + PROMPT + STEPS)[None] * 7
        model(input_ids=rows[:, :PROMPT], past_key_values=cache, use_cache=True)
        before = engine.stats()
        for n in range(PROMPT, PROMPT + STEPS):
            model(input_ids=rows[:, n : n + 1], past_key_values=cache, use_cache=True)
        return engine, engine.stats() - before


def test_a_run_shows_how_skewed_its_routing_is() -> None:
    engine, counted = decoded()
    shown = shown_by(engine, counted, counted, PROMPT)
    assert shown.skew is not None
    a_third = counted.decode_uses // 3
    fewer = shown_by(engine, counted, replace(counted, decode_hits=counted.decode_hits - a_third), PROMPT).skew
    assert fewer is not None and 1.2 * fewer < shown.skew, "who hits less has favourites less"
    guessed = replace(counted, prefetches_used=counted.prefetches_used + a_third)
    assert shown_by(engine, guessed, guessed, PROMPT).skew == fewer, "a guess is no hit of the cache"


@pytest.mark.parametrize("switches", [{"alpha": 0.5}, {"eviction": "score", "alpha": 0.1}])
def test_where_substitutes_answer_misses_hits_say_nothing(switches: dict[str, Any]) -> None:
    engine, counted = decoded(**switches)
    shown = shown_by(engine, counted, counted, PROMPT)
    assert shown.skew is None and shown.layer is not None


def test_a_run_whose_experts_others_computed_teaches_nothing(tmp_path: Path) -> None:
    config = EngineConfig(cluster="home")
    engine = SimpleNamespace(is_on_this_cpu=False, config=config)
    model: Any = SimpleNamespace(offload=engine, device=torch.device("cpu"))
    generation: Any = SimpleNamespace(answers=["one"], decode_counters=Counters(forward_passes=99))
    layers: Any = None
    assert look_back(model, generation, tmp_path, layers) is None


def test_a_short_run_shows_nothing() -> None:
    engine, counted = decoded()
    assert shown_by(engine, replace(counted, forward_passes=9), counted, PROMPT) == UNKNOWN


def test_memory_is_measured_on_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch 256 MiB beside a budget that is meant to hold the whole process."""
    seen = []

    def stop(device: object, memory: object = None) -> None:
        seen.append(memory)
        raise InterruptedError

    monkeypatch.setattr("smoe.report.hindsight.quick_rates", stop)
    engine = SimpleNamespace(slot_memory=object())
    with pytest.raises(InterruptedError):
        _simulated(engine, None, None, None, 1, False)  # type: ignore[arg-type]
    assert seen == [engine.slot_memory]


def test_the_beginning_of_a_text_by_hand() -> None:
    """Eight steps took 0.5 s each, later ones 0.2; a simulation of 0.1 s a step explains one second of that, 0.4 of
    which it has from an earlier run."""
    generation: Any = SimpleNamespace(later_seconds_per_token=0.2, step_seconds=[0.5] * 8 + [0.2] * 20)
    run: Any = SimpleNamespace(beginning_seconds=31 * 0.1 + 1.0, seconds_per_token=0.1)
    assert _beginning_shown(generation, run, Pace(beginning=0.4), Access.DIRECT) == pytest.approx(8 * 0.3 - 0.6)
    slow: Any = SimpleNamespace(beginning_seconds=31 * 0.1 + 9.0, seconds_per_token=0.1)
    assert _beginning_shown(generation, slow, Pace(), Access.DIRECT) == LEAST_BEGINNING
    short: Any = SimpleNamespace(later_seconds_per_token=None, step_seconds=[0.5] * 8)
    assert _beginning_shown(short, run, Pace(), Access.DIRECT) is None
    assert _beginning_shown(generation, run, Pace(), Access.NONE) is None
