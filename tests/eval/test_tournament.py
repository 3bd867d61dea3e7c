"""Tournaments of predictors and evictions: who takes part, what is remembered, what `auto` is afterwards.

Would catch: recall counted against the wrong layer, a predictor that is heard but leaves a trace in the outputs, a
winner that nobody uses, or that another machine or model uses.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.eval import tournament
from smoe.eval.tournament import FINALISTS, LEAST_TOKENS, ROUNDS, hits, hold, times_of, tokens_of
from smoe.load.winners import Winner, remember, where, winners_of, with_winners
from smoe.metrics import Counters
from smoe.models.read_spec import read_spec
from smoe.policy.prediction import Prediction
from smoe.presets import configure
from smoe.routing import Phase, Routing
from tests import oracle

Open = Callable[..., PreTrainedModel]
EVICTIONS = ("lru", "lfu", "auto")
IDS = [(7 * n * n + 3) % 60 + 1 for n in range(LEAST_TOKENS)]


def chosen(layer: int, *experts: int, phase: Phase = Phase.DECODE) -> Routing:
    return Routing(layer, phase, 8, [list(experts)])


def test_recall_and_precision_by_hand() -> None:
    """Layers 0 to 2: three of four wanted are named, among five; of a step's last layer nothing can be said."""
    trace = [chosen(0, 1, 2), chosen(1, 3, 4), chosen(2, 5, 6), chosen(0, 1, 2)]
    said = [
        [Prediction(1, (3, 7)), Prediction(2, (0, 1))],
        [Prediction(2, (5, 6, 0))],
        [Prediction(0, (1, 2))],
        [],
    ]
    trace[3] = chosen(0, 1, 2, phase=Phase.PREFILL)
    assert hits(trace, said) == (3 / 4, 3 / 5)
    assert hits(trace, [[], [], [], []]) == (0.0, 0.0)


def test_times_are_what_was_counted(toy: Callable[..., Path], open_model: Open) -> None:
    engine = open_model(toy("qwen2_moe"), "half").offload
    counted = Counters(
        forward_passes=10, loads=15, prefetches=5, read_busy_seconds=4.0, compute_seconds=3.0, decode_uses=30,
        forward_seconds=20.0, wait_seconds=1.0, plan_seconds=2.0,
    )  # fmt: skip
    times, layers = times_of(engine, counted), len(engine.store.layers)
    assert (times.load, times.expert(1), times.expert(3)) == pytest.approx((0.2, 0.1, 0.3))
    assert (times.layer(1), times.deciding) == pytest.approx((14.0 / (10 * layers), 0.2 / layers))


@pytest.fixture
def held(toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tournament, "TURN_WARM", 2)
    monkeypatch.setattr(tournament, "TURN_TIMED", 3)
    folder = toy("qwen2_moe")
    model = open_model(folder, "half", eviction="score", prefetch="none")
    kinds, ticks = ("prefetch", "eviction"), list[int]()
    found = hold(model, read_spec(str(folder), model.offload.config), IDS, kinds, EVICTIONS, ticks.append)
    assert sum(ticks) == tokens_of(len(IDS), kinds)
    return model, folder, {each.kind: each for each in found}


def test_everybody_is_simulated_and_the_best_are_run(held: Any) -> None:
    _, _, found = held
    prefetch, eviction = found["prefetch"], found["eviction"]
    assert {entrant.name for entrant in eviction.entrants} == set(EVICTIONS)
    names = {entrant.name for entrant in prefetch.entrants}
    assert {"none", "next-gate", "stacked-gates"} <= names and not names & {"whole-layer", "auto"}
    for each in (prefetch, eviction):
        finalists = [entrant for entrant in each.entrants if entrant.measured_seconds]
        others = [entrant for entrant in each.entrants if not entrant.measured_seconds]
        assert finalists == list(each.entrants[:FINALISTS])
        assert all(len(entrant.measured_seconds) == ROUNDS for entrant in finalists)
        assert each.winner.seconds == min(entrant.seconds for entrant in finalists)
        assert max(entrant.simulated_seconds for entrant in finalists) <= min(
            entrant.simulated_seconds for entrant in others
        )
    guesses = {entrant.name: entrant for entrant in prefetch.entrants if entrant.recall is not None}
    assert guesses["next-gate"].recall == guesses["stacked-gates"].recall > 0, "they ask the same routers"
    assert guesses["next-gate"].asking_seconds > 0


def test_the_engine_goes_on_with_the_winners_and_its_bits(held: Any) -> None:
    model, folder, found = held
    assert model.offload.config.eviction == found["eviction"].winner.name
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))


def test_what_cannot_be_judged_is_refused(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("qwen2_moe")
    spec = read_spec(str(folder), configure())
    with pytest.raises(ConfigError, match="at least 96 are needed"):
        hold(open_model(folder, "half"), spec, IDS[:9], ["prefetch"], EVICTIONS, print)
    with pytest.raises(ConfigError, match="every expert fits"):
        hold(open_model(folder, "full"), spec, IDS, ["prefetch"], EVICTIONS, print)


CPU = torch.device("cpu")


def won(name: str, machine: str = "") -> Winner:
    return Winner(name, 0.1, "lru", 0.2, 0.5, "a text", machine or where(configure(), CPU))


def test_auto_is_the_winner_where_it_won(toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy("mixtral"), tmp_path / "model"))
    remember(folder, "eviction", won("lfu"))
    remember(folder, "prefetch", won("stacked-gates"))
    engine = open_model(folder, "half").offload
    assert (engine.config.eviction, engine.config.prefetch) == ("lfu", "stacked-gates")
    assert engine.executor.trial is not None, "what does not pay where it runs is off by itself"
    assert "won the tournament on a text with 50% of the experts resident" in engine.reasons["eviction"]
    asked = open_model(folder, "half", eviction="lru", prefetch="none").offload
    assert (asked.config.eviction, asked.config.prefetch) == ("lru", "none"), "what is asked for goes before"


def test_a_winner_wins_on_its_machine(toy: Callable[..., Path], tmp_path: Path) -> None:
    """Not on another processor, nor beside a device, acted or not."""
    folder = Path(shutil.copytree(toy("mixtral"), tmp_path / "model"))
    acted = configure(device="emulated")
    here, there = where(configure(), CPU), where(acted, CPU)
    assert there.startswith(here) and there != here and there != where(replace(acted, profile="rtx-4060-ti"), CPU)
    for machine in ("another", there):
        remember(folder, "eviction", won("lfu", machine))
        assert with_winners(configure(), folder, read_spec(str(folder), configure()), CPU).config.eviction == "auto"
    assert with_winners(acted, folder, read_spec(str(folder), acted), CPU).config.eviction == "lfu"


@pytest.mark.parametrize("name", ["popularity", "expert-mlp", "corrected-gates"])
def test_a_winner_whose_learning_is_gone_decides_nothing(
    name: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(toy("mixtral"), tmp_path / "model"))
    remember(folder, "prefetch", won(name))
    remember(folder, "eviction", won("learned"))
    engine = open_model(folder, "half").offload
    assert (engine.config.prefetch, engine.config.eviction) == ("auto", "auto") and not engine.reasons
    assert f"`prefetch` auto: {name} won the tournament, but is not used" in caplog.text
    with pytest.raises(ConfigError, match="learned yet"):
        open_model(folder, "half", prefetch=name)


def test_what_cannot_be_read_is_no_winner(tmp_path: Path) -> None:
    path = remember(tmp_path, "eviction", won("lfu"))
    whole = path.read_text()
    for damaged in (
        whole[: len(whole) // 2],
        whole.replace("lfu", "gone"),
        whole.replace('"format": 2', '"format": 9'),
    ):
        path.write_text(damaged)
        assert winners_of(tmp_path, where(configure(), CPU)) == {}
