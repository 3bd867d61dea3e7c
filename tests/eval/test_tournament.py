"""Tournaments of predictors and evictions: who takes part, what is remembered, what `auto` is afterwards.

Would catch: recall counted against the wrong layer, a predictor that is heard but leaves a trace in the outputs, a
winner that nobody uses, or that another machine or model uses; finals without the baseline; predictors judged beside
another eviction than the one that won; a learned eviction that takes part without what was learned.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.eval import tournament
from smoe.eval.eviction_entrants import evictions_of
from smoe.eval.tournament import (
    ALWAYS,
    FINALISTS,
    LEAD,
    LEAST_TOKENS,
    MOST_ROUNDS,
    ROUNDS,
    Entrant,
    finalists_of,
    hits,
    hold,
    is_decided,
    placed_of,
    tokens_of,
)
from smoe.load import cache_weights, next_use
from smoe.load.tuned_settings import Decided, Winner, remember, where, winners_of, with_winners
from smoe.metrics import Counters
from smoe.models.read_spec import read_spec
from smoe.policy.eviction.learned import Learned, NextUse, untrained
from smoe.policy.prediction import Prediction
from smoe.policy.registry import ONLINE_EVICTION
from smoe.presets import configure
from smoe.routing import Phase, Routing
from tests import oracle

Open = Callable[..., PreTrainedModel]
WITHOUT_LEARNING = set(ONLINE_EVICTION) - {"learned"}
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


def test_listening_is_no_time_of_the_engine() -> None:
    """By a clock that moves on a second with every question to it."""
    seconds = iter(range(100))
    listener = tournament._RoutingCollector({}, lambda: float(next(seconds)))
    for routing in (chosen(0, 1, 2), chosen(1, 3, 4)):
        listener.planned(routing, None)  # type: ignore[arg-type]
        listener.computed(SimpleNamespace(phase=Phase.DECODE, layer=0, hidden=None), None)  # type: ignore[arg-type]
    listener.planned(chosen(2, 1, 2), None)  # type: ignore[arg-type]
    left = listener.less_listening(Counters(plan_seconds=10.0, forward_seconds=50.0, compute_seconds=20.0))
    assert (left.plan_seconds, left.forward_seconds, left.dense_seconds) == (7.0, 45.0, 18.0)


@pytest.fixture
def held(toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tournament, "TURN_WARM", 2)
    monkeypatch.setattr(tournament, "TURN_TIMED", 3)
    folder = toy("qwen2_moe")
    model = open_model(folder, "half", eviction="score", prefetch="none")
    kinds, ticks = ("prefetch", "eviction"), list[int]()
    found = hold(model, read_spec(str(folder), model.offload.config), IDS, kinds, ticks.append)
    assert sum(ticks) == tokens_of(len(IDS), kinds)
    return model, folder, {each.kind: each for each in found}


def test_everybody_is_simulated_and_the_best_are_run(held: Any) -> None:
    _, _, found = held
    prefetch, eviction = found["prefetch"], found["eviction"]
    assert {entrant.name for entrant in eviction.entrants} == WITHOUT_LEARNING
    assert "smoe tune on the model with `eviction=learned`" in eviction.refused["learned"].why
    assert eviction.refused["learned"].lacking.startswith("no tuned values are stored")
    names = {entrant.name for entrant in prefetch.entrants}
    assert {"none", "next-gate", "stacked-gates"} <= names and not names & {"whole-layer", "auto"}
    for each in (prefetch, eviction):
        finalists = [entrant for entrant in each.entrants if entrant.measured_seconds]
        others = [entrant for entrant in each.entrants if not entrant.measured_seconds]
        assert finalists == list(each.entrants[:FINALISTS])
        assert len({len(entrant.measured_seconds) for entrant in finalists}) == 1
        assert ROUNDS <= len(finalists[0].measured_seconds) <= MOST_ROUNDS
        assert finalists == placed_of(finalists, each.baseline)
        best = sorted(entrant.simulated_seconds for entrant in each.entrants)[: FINALISTS - 1]
        assert all(entrant.simulated_seconds > best[-1] for entrant in others), "the best of the simulation run"
        assert {ALWAYS[each.kind], each.baseline} <= {entrant.name for entrant in finalists}
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
        hold(open_model(folder, "half"), spec, IDS[:9], ["prefetch"], print)
    with pytest.raises(ConfigError, match="every expert fits"):
        hold(open_model(folder, "full"), spec, IDS, ["prefetch"], print)


def test_the_baseline_is_in_the_finals() -> None:
    ranked = [Entrant(name, float(number)) for number, name in enumerate("abcde")]

    def names(always: str) -> str:
        return "".join(entrant.name for entrant in finalists_of(ranked, always))

    assert [names(always) for always in ("a", "b", "c", "d", "e")] == ["abc", "abc", "abc", "abd", "abe"]
    assert [names(always) for always in ("ab", "de", "bd")] == ["abc", "ade", "abd"]
    assert [entrant.name for entrant in finalists_of(ranked[:2], "b")] == ["a", "b"]


@pytest.mark.parametrize(
    ("others", "order"),
    [
        ({"b": (0.99, 0.99, 0.99)}, "ab"),  # faster, and no more than twice the same may differ
        ({"b": (0.90, 0.97, 0.99)}, "ab"),  # one round says so by chance
        ({"b": (0.97, 0.90, 0.97)}, "ba"),
        ({"b": (0.97, 0.97, 0.97), "c": (0.90, 0.90, 0.99)}, "bca"),  # the fastest, but not in every round
        ({"b": (1.20, 1.20, 1.20), "c": (1.10, 1.10, 1.10)}, "acb"),
    ],
)
def test_the_baseline_wins_ties(others: dict[str, tuple[float, ...]], order: str) -> None:
    """The winner first, the others by their times; `a` takes one second in each of three rounds."""
    finalists = [Entrant(name, 0.0, measured) for name, measured in ({"a": (1.0, 1.0, 1.0)} | others).items()]
    assert "".join(entrant.name for entrant in placed_of(finalists, "a")) == order


def test_a_lead_is_more_than_the_bound_says() -> None:
    usual = Entrant("auto", 0.0, (1.0, 2.0, 1.0))
    assert Entrant("lfu", 0.0, (0.99 * (1 - LEAD), 1.99 * (1 - LEAD), 0.5)).beats(usual)
    assert not Entrant("lfu", 0.0, (1 - LEAD, 1.0, 0.5)).beats(usual)


def test_one_bad_round_is_made_up_for_by_more_of_them() -> None:
    """As a burst of other work on the machine would have it; the fastest by the median has to win the rest."""
    usual, rounds = Entrant("a", 0.0, (1.0,) * 7), (1.2, 0.8, 0.9, 0.8, 0.9, 0.8, 0.9)
    decided = [
        is_decided([replace(usual, measured_seconds=usual.measured_seconds[:n]), Entrant("b", 0.0, rounds[:n])], "a")
        for n in range(3, 8)
    ]
    assert decided == [False, False, True, True, True]
    assert is_decided([usual, Entrant("b", 0.0, (1.1,) * 7)], "a"), "the baseline is the fastest"
    assert not is_decided([usual, Entrant("b", 0.0, (0.99,) * 7)], "a"), "faster, but not by enough"


@pytest.mark.parametrize(("usual", "baseline"), [("next-gate", "next-gate"), ("look-ahead", "none")])
def test_the_prefetch_that_serves_by_itself_is_the_baseline(
    usual: str, baseline: str, toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs beside `none`, however the simulation places them; one that cannot take part is named."""
    monkeypatch.setattr(tournament, "predictor_name", lambda spec, config, device: usual)
    monkeypatch.setattr(tournament, "_turn", lambda *_: 1.0)
    model = open_model(toy("qwen2_moe"), "half", prefetch="none")
    (found,) = hold(model, read_spec(str(toy("qwen2_moe")), model.offload.config), IDS, ["prefetch"], lambda _: None)
    assert (found.baseline, found.winner.name, found.serves) == (baseline, baseline, usual)
    assert found.stays == (baseline == usual), "who was not judged does not serve"
    assert {"none", baseline} <= {entrant.name for entrant in found.entrants if entrant.measured_seconds}
    assert ("look-ahead" in found.refused) == (usual == "look-ahead")


@pytest.fixture
def trained(toy: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint of which next uses have been learned, and weights fitted."""
    folder = Path(shutil.copytree(toy("qwen2_moe"), tmp_path / "model"))
    experts = {site.layer: site.experts for site in read_spec(str(folder), configure()).sites}
    layers, width = max(experts) + 1, max(experts.values())
    shapes = ((layers, width, 2), (layers, 2), (layers, width, 2), (layers, width))
    learned = NextUse(0.25, untrained().weights, *(np.ones(shape, np.float32) for shape in shapes))
    next_use.TrainedNextUse(learned, 900).store(folder)
    cache_weights.FittedWeights((0.5, 0.5, 0.0, 0.0), 0.4, 900).store(folder)
    return folder


def test_predictors_are_judged_beside_the_eviction_that_won(
    trained: Path, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the simulation and in the finals, with what it has learned; and evictions without any predictor."""
    model = open_model(trained, "half", eviction="score", prefetch="none")
    engine, simulated, run = model.offload, list[tuple[Any, bool]](), list[tuple[Any, int]]()
    on_clock = tournament.on_clock

    def simulate(engine: Any, trace: Any, settings: Any, times: Any, by: Any) -> float:
        simulated.append((settings, by is None))
        return 0.0 if settings.name == "learned" and by is None else on_clock(engine, trace, settings, times, by)

    def turn(model: Any, ids: Any, number: int, tick: Any) -> float:
        run.append((engine.executor.arrivals.eviction, len(engine.executor.prefetching.predictors)))
        return 1.0 if engine.config.eviction == "learned" else 2.0

    monkeypatch.setattr(tournament, "on_clock", simulate)
    monkeypatch.setattr(tournament, "_turn", turn)
    spec = read_spec(str(trained), engine.config)
    eviction, prefetch = hold(model, spec, IDS, ("prefetch", "eviction"), lambda count: None)
    assert (eviction.kind, eviction.winner.name, prefetch.kind) == ("eviction", "learned", "prefetch")
    judged = len(ONLINE_EVICTION)
    assert {alone for _, alone in simulated[:judged]} == {True}
    assert len(simulated) > judged + 2 and all(settings.next_use is not None for settings, _ in simulated[judged:])
    first, then = run[: FINALISTS * ROUNDS], run[FINALISTS * ROUNDS :]
    assert len({type(policy) for policy, _ in first}) == FINALISTS
    assert len({predictors for _, predictors in first}) == 1, "nothing is prefetched while evictions are judged"
    assert len(then) == FINALISTS * ROUNDS and len({predictors for _, predictors in then}) == 2
    assert all(isinstance(policy, Learned) and policy._learned.target.any() for policy, _ in then)


def test_evictions_are_as_loading_would_make_them(trained: Path, open_model: Open) -> None:
    model = open_model(trained, "half", eviction="score", prefetch="none")
    found, refused = evictions_of(model, read_spec(str(trained), model.offload.config))
    assert found.keys() == set(ONLINE_EVICTION) and not refused
    assert found["multidimensional"].cache_weights == (0.5, 0.5, 0.0, 0.0)
    learned = found["learned"].next_use
    assert learned is not None and learned.rate == 0.25 and learned.target.any()


def test_a_folder_that_cannot_be_looked_into_costs_those_who_need_it_their_part(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "a folder")

    monkeypatch.setattr("smoe.load.learned_file.learned", closed)
    model = open_model(toy("qwen2_moe"), "half", eviction="score")
    spec = read_spec(str(toy("qwen2_moe")), model.offload.config)
    evictions, absent = evictions_of(model, spec)
    predictors, refused = tournament.predictors_of(model, spec)
    assert evictions.keys() == WITHOUT_LEARNING and "Permission denied" in absent["learned"].why
    assert "next-gate" in predictors and "Permission denied" in refused["affinity"].why


def test_scores_that_cannot_be_heard_keep_one_eviction_out(toy: Callable[..., Path], open_model: Open) -> None:
    """phimoe's router follows no rule that is known; the toy of another family was merely loaded without scores."""
    for family, why in (
        ("phimoe", "follows no rule that smoe knows"),
        ("qwen2_moe", "was loaded without the routers' scores"),
    ):
        model = open_model(toy(family), "half")
        found, refused = evictions_of(model, read_spec(str(toy(family)), model.offload.config))
        assert found.keys() == WITHOUT_LEARNING - {"score"} and why in refused["score"].why


CPU = torch.device("cpu")


def won(name: str, machine: str = "", share: float = 0.5) -> Winner:
    return Winner(name, 0.1, "lru", 0.2, share, "a text", machine or where(configure(), CPU))


def decided(folder: Path, config: EngineConfig, share: float = 0.5) -> Decided:
    return with_winners(config, folder, read_spec(str(folder), config), CPU, lambda learned_bytes: share)


def test_auto_is_the_winner_where_it_won(toy: Callable[..., Path], open_model: Open, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy("mixtral"), tmp_path / "model"))
    remember(folder, "eviction", won("lfu"))
    remember(folder, "prefetch", won("stacked-gates"))
    engine = open_model(folder, "half").offload
    assert (engine.config.eviction, engine.config.prefetch) == ("lfu", "stacked-gates")
    assert engine.executor.prefetching.trial is not None, "what does not pay where it runs is off by itself"
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
        assert decided(folder, configure()).config.eviction == "auto"
    assert decided(folder, acted).config.eviction == "lfu"


def test_a_winner_wins_where_about_as_many_experts_are_resident(toy: Callable[..., Path], tmp_path: Path) -> None:
    """Of 30 % from 20 to 40 %; among several the nearest, and where it kept its place, what serves by itself."""
    folder = Path(shutil.copytree(toy("mixtral"), tmp_path / "model"))
    remember(folder, "eviction", won("lfu", share=0.3))

    def at(*shares: float) -> list[str]:
        return [decided(folder, configure(), share).config.eviction for share in shares]

    assert at(0.19, 0.21, 0.3, 0.39, 0.41) == ["auto", "lfu", "lfu", "lfu", "auto"]
    far = decided(folder, configure(), 0.5).reasons["eviction"]
    assert "is for 30% of the experts resident, and 50% are; to measure, run smoe tune with `eviction=auto`" in far
    remember(folder, "eviction", won("lru", share=0.4))
    remember(folder, "eviction", won("auto", share=0.6))
    assert at(0.21, 0.33, 0.37, 0.48, 0.55, 0.9) == ["lfu", "lfu", "lru", "lru", "auto", "auto"]
    kept = decided(folder, configure(), 0.55).reasons["eviction"]
    assert kept.startswith("stayed the choice after the tournament on")


def test_of_one_size_the_last_winner_is_kept_and_other_machines_keep_theirs(tmp_path: Path) -> None:
    here = where(configure(), CPU)
    for winner in (won("lfu", share=0.3), won("lru", share=0.304), won("score", share=0.4), won("lru", "another")):
        remember(tmp_path, "eviction", winner)
    assert [winner.name for winner in winners_of(tmp_path, here)["eviction"]] == ["lru", "score"]
    assert [winner.name for winner in winners_of(tmp_path, "another")["eviction"]] == ["lru"]


@pytest.mark.parametrize("name", ["popularity", "expert-mlp", "corrected-gates"])
def test_a_winner_whose_learning_is_gone_decides_nothing(
    name: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(toy("mixtral"), tmp_path / "model"))
    remember(folder, "prefetch", won(name))
    remember(folder, "eviction", won("learned"))
    engine = open_model(folder, "half").offload
    assert (engine.config.prefetch, engine.config.eviction) == ("auto", "auto") and not engine.reasons
    assert f"`prefetch=auto`: {name} won the tournament, but is not used" in caplog.text
    with pytest.raises(ConfigError, match="no tuned values"):
        open_model(folder, 64 << 20, prefetch=name)  # room for what would be learned: else that is refused first


def test_what_cannot_be_read_is_no_winner(tmp_path: Path) -> None:
    path = remember(tmp_path, "eviction", won("lfu"))
    whole = path.read_text()
    for damaged in (
        whole.replace("lfu", "gone"),
        whole.replace('"name"', '"nobody"'),
        json.dumps({"format": 3, "eviction": json.loads(whole)["eviction"][0]}),
        whole.replace('"resident_share": 0', '"resident_share": "half", "was": 0'),
    ):
        path.write_text(damaged)
        assert winners_of(tmp_path, where(configure(), CPU)) == {}
