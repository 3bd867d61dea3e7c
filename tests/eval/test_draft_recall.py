"""Drafts and other predictors on the same exact runs.

Would catch: a gate's answer counted against another layer or token, a predictor that knows what it is to guess, a run
that changes because it is listened to, tokens after the end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from smoe.errors import ConfigError
from smoe.eval.draft_recall import compare
from smoe.eval.exact_run import SPARES, ExactRun, RunListener, record
from smoe.load.engine_parts import scoring_rules
from smoe.models.read_spec import read_spec
from smoe.prediction.activation_path import NO_EXPERT
from smoe.runtime.draft_model import Alignment, Greedy
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step
from tests import oracle, zoo
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
PROMPTS = [oracle.PROMPT[0].tolist(), oracle.PROMPT[0, :9].tolist()]
TOKENS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = zoo.save("qwen3_moe", tmp_path_factory.mktemp("packed"), eos_token_id=None)
    pack_folder(folder, precision="int2")
    return folder


class Inputs(StepObserver):
    """Keeps what every router was given, and what it chose."""

    def __init__(self) -> None:
        self.hidden: dict[int, list[torch.Tensor]] = {}
        self.chosen: dict[int, list[list[int]]] = {}

    def computed(self, step: Step, output: torch.Tensor) -> None:
        self.hidden.setdefault(step.layer, []).extend(step.hidden.clone())
        self.chosen.setdefault(step.layer, []).extend(step.top_k_index.tolist())


@pytest.fixture
def recorded(folder: Path, open_model: Open) -> tuple[PreTrainedModel, ExactRun, Inputs]:
    model, inputs = open_model(folder, "half"), Inputs()
    spec = read_spec(folder, model.offload.config)
    listener = RunListener(model, spec, scoring_rules(model, spec))
    with model.offload.observed_by(listener), model.offload.observed_by(inputs):
        run = record(Greedy(model), listener, PROMPTS[0], TOKENS, lambda _: None)
    assert run is not None
    return model, run, inputs


def test_a_run_is_what_the_model_generates(recorded: Any, folder: Path) -> None:
    _, run, inputs = recorded
    theirs = oracle.greedy(oracle.reference(folder), new_tokens=TOKENS).tokens[0].tolist()
    assert [*run.prompt, *run.tokens] == theirs
    layers = sorted(inputs.chosen)
    for place, layer in enumerate(layers):
        assert run.chosen[:, place].tolist() == inputs.chosen[layer][len(PROMPTS[0]) :]


def test_the_previous_token_is_named_by_the_one_before(recorded: Any) -> None:
    _, run, inputs = recorded
    named = run.named["previous token"]
    assert np.array_equal(named[1:, :, :2], run.chosen[:-1]) and (named[:, :, 2:] == NO_EXPERT).all()
    for place, layer in enumerate(sorted(inputs.chosen)):
        assert named[0, place, :2].tolist() == inputs.chosen[layer][len(PROMPTS[0]) - 1]


def test_popularity_knows_what_came_before_and_nothing_else(recorded: Any) -> None:
    _, run, inputs = recorded
    for place, layer in enumerate(sorted(inputs.chosen)):
        for n in range(TOKENS):
            counts = np.bincount(np.ravel(inputs.chosen[layer][: len(PROMPTS[0]) + n]), minlength=8)
            expected = sorted(range(8), key=lambda expert: (-counts[expert], expert))[: 2 + SPARES]
            assert run.named["popularity"][n, place].tolist() == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_gate_names_what_a_later_router_says_of_this_layers_input(depth: int, recorded: Any) -> None:
    """By the routers' own modules; nothing is said of the first layers."""
    model, run, inputs = recorded
    named, layers = run.named[f"gate {depth} ahead"], sorted(inputs.hidden)
    modules = dict(model.named_modules())
    assert (named[:, :depth] == NO_EXPERT).all() and (named[:, depth:] != NO_EXPERT).all()
    for place in range(depth, len(layers)):
        router = modules[model.offload.anatomy.routers[layers[place]]]
        for n in range(TOKENS):
            hidden = inputs.hidden[layers[place - depth]][len(PROMPTS[0]) + n]
            index = router(hidden[None])[-1][0]
            assert set(named[n, place, :2].tolist()) == set(index.tolist())


def test_drafts_and_predictors_are_compared(folder: Path, open_model: Open) -> None:
    model = open_model(folder, "half")
    drafts = {name: open_model(folder, "full", precision=name) for name in ("auto", "int2")}
    alignments = [Alignment(1, 1), Alignment(0, 0)]
    ticks: list[int] = []
    spec = read_spec(folder, model.offload.config)
    found = compare(model, spec, drafts, PROMPTS, TOKENS, alignments, ticks.append)
    assert sum(ticks) == len(PROMPTS) * TOKENS * (1 + len(drafts) * len(alignments))
    assert found.prompt_tokens == (24, 9) and found.tokens == (TOKENS, TOKENS)
    by_name = {(draft.precision, draft.alignment): draft for draft in found.drafts}
    for alignment in alignments:
        same = by_name["auto", alignment]
        assert same.recall.overall == same.recall.whole_layer == same.own_token == 1.0
    aligned, alone = by_name["int2", Alignment(1, 1)], by_name["int2", Alignment(0, 0)]
    assert alone.recall.overall < aligned.recall.overall < 1.0 and alone.own_token < 1.0
    assert aligned.recall.overall_by_spares == sorted(aligned.recall.overall_by_spares)
    assert found.predictors.keys() == {"previous token", "popularity", "gate 1 ahead", "gate 2 ahead"}
    assert "corrected gates" in found.refused and found.best_gate is not None
    assert found.predictors["gate 2 ahead"].guessed.tolist() == [False, False, True, True]
    assert len(found.as_json()["shadows"]) == 4


def test_a_text_that_ends_has_fewer_tokens(folder: Path, open_model: Open) -> None:
    """The token at which it ends is never decoded, so nothing is counted for it; one that ends at once is left out."""
    model = open_model(folder, "half")
    spec = read_spec(folder, model.offload.config)
    whole = oracle.greedy(oracle.reference(folder), new_tokens=TOKENS).tokens[0, len(PROMPTS[0]) :].tolist()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [whole[4], 127]
    end = whole.index(whole[4])
    ticks: list[int] = []
    found = compare(model, spec, {}, PROMPTS[:1], TOKENS, [], ticks.append)
    assert sum(ticks) == TOKENS, "the bar goes to its end all the same"
    assert found.tokens == (end,) and found.predictors["popularity"].exists.sum() == end
    model.generation_config.eos_token_id = whole[0]
    with pytest.raises(ConfigError, match="ends every text right after its prompt"):
        compare(model, spec, {}, PROMPTS[:1], TOKENS, [], lambda _: None)


def test_periods_that_a_family_cannot_have_are_refused(toy: Callable[..., Path], open_model: Open) -> None:
    folder = toy("lfm2_moe", eos_token_id=None)
    model, draft = open_model(folder, "half"), open_model(folder, "full")
    spec = read_spec(folder, model.offload.config)
    with pytest.raises(ConfigError, match="cannot be copied position by position") as refused:
        compare(model, spec, {"auto": draft}, PROMPTS, 3, [Alignment(1, 4)], lambda _: None)
    assert refused.value.setting == "periods"
    found = compare(model, spec, {"auto": draft}, PROMPTS, 3, [Alignment(1, 0)], lambda _: None)
    assert found.drafts[0].recall.overall == 1.0
