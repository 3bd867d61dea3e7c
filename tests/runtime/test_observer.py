"""Observers hear every layer of every pass once, in order, and are gone when they leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smoe.policy.step import Decision
from smoe.prediction.next_gate import NextGate
from smoe.routing import Phase, Routing
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step
from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]


class Heard(StepObserver):
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.outputs: list[torch.Tensor] = []

    def routed(self, step: Step) -> None:
        self.events.append(("routed", step.layer, step.phase, step.top_k_index.tolist()))

    def planned(self, routing: Routing, decision: Decision) -> None:
        chosen = sorted({expert for row in routing.top_k_index for expert in row})
        assert sorted(serve.key[1] for serve in decision.plan.serves) == chosen
        self.events.append(("planned", routing.layer, routing.phase, routing.top_k_index))

    def computed(self, step: Step, output: torch.Tensor) -> None:
        assert output.shape == step.hidden.shape
        self.events.append(("computed", step.layer, step.phase, step.top_k_index.tolist()))
        self.outputs.append(output.clone())


def test_every_layer_is_heard_once_in_order(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("qwen3_moe"), "half")
    expected = model(oracle.PROMPT).logits
    observer = Heard()
    with model.offload.observed_by(observer):
        assert torch.equal(model(oracle.PROMPT).logits, expected), "hearing changes nothing"
        model(oracle.PROMPT[:, :1])
    layers = sorted(model.offload.store.layers)
    assert len(layers) == len(zoo.sparse_layers(model))
    wanted = [(what, layer, phase) for phase in (Phase.PREFILL, Phase.DECODE) for layer in layers for what in STAGES]
    assert [event[:3] for event in observer.events] == wanted
    for first in range(0, len(observer.events), 3):
        routed, planned, computed = observer.events[first : first + 3]
        assert routed[3] == planned[3] == computed[3]
    count = len(observer.events)
    model(oracle.PROMPT)
    assert len(observer.events) == count, "it has left"


STAGES = ("routed", "planned", "computed")


@pytest.mark.parametrize("stage", STAGES)
def test_what_an_observer_raises_ends_the_pass_and_harms_nothing(
    stage: str, toy: Callable[..., Path], open_model: Open
) -> None:
    class Failing(StepObserver):
        pass

    def fail(*_: Any) -> None:
        raise ZeroDivisionError(stage)

    model = open_model(toy("mixtral"), "half")
    expected = model(oracle.PROMPT).logits
    observer = Failing()
    setattr(observer, stage, fail)
    with pytest.raises(ZeroDivisionError, match=stage), model.offload.observed_by(observer):
        model(oracle.PROMPT)
    assert model.offload.executor.observers == []
    assert torch.equal(model(oracle.PROMPT).logits, expected)


def test_a_predictor_hears_every_router_once(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that prompts and decode steps share; a history with entries twice would be learnt from wrongly."""
    heard: list[Any] = []
    monkeypatch.setattr(NextGate, "observe", lambda self, routing: heard.append(routing))
    model = open_model(toy("qwen3_moe"), "half", prefetch="next-gate")
    layers = sorted(model.offload.store.layers)
    for ids, phase in ((oracle.PROMPT, Phase.PREFILL), (oracle.PROMPT[:, :1], Phase.DECODE)):
        heard.clear()
        model(ids)
        assert [(routing.layer, routing.phase) for routing in heard] == [(layer, phase) for layer in layers]


@pytest.mark.parametrize(("switch", "is_on_trial"), [(True, True), (False, False), (None, False)])
def test_prefetching_is_on_trial_where_asked(
    switch: bool | None, is_on_trial: bool, toy: Callable[..., Path], open_model: Open
) -> None:
    """A prefetch that was asked for by name is not on trial unless that is asked for, too."""
    model = open_model(toy("qwen3_moe"), "half", prefetch="next-gate", prefetch_trial=switch)
    assert (model.offload.executor.prefetching.trial is not None) is is_on_trial
