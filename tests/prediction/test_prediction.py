"""Predictions: what is worth a load comes best first, and nobody else hears that the routers were asked.

Would catch: experts in the order of their numbers where only the first few get a staging slot, a loss that counts a
router twice, a user's hook that fires for a pass that never was.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.memory.movers import HostMover, SlotMover
from smoe.models.scoring import in_order
from smoe.policy.importance import Thresholds
from smoe.policy.prediction import Grading, Prediction, Sight
from smoe.policy.trial import LookAheadTrial
from smoe.prediction.next_gate import NextGate
from smoe.routing import Phase
from tests import oracle, zoo

Open = Callable[..., PreTrainedModel]


def next_gate_of(model: PreTrainedModel) -> NextGate:
    predictor = model.offload.executor.prefetching.predictors[Phase.DECODE]
    assert isinstance(predictor, NextGate)
    return predictor


def by_hand(index: torch.Tensor, weights: torch.Tensor) -> list[int]:
    """Every chosen expert, the one of highest weight for any row first, equal ones by number."""
    best: dict[int, float] = {}
    for row, shares in zip(index.tolist(), weights.tolist(), strict=True):
        for expert, share in zip(row, shares, strict=True):
            best[expert] = max(share, best.get(expert, 0.0))
    return [expert for _, expert in sorted((-share, expert) for expert, share in best.items())]


def test_rows_of_a_batch_are_ranked_together(toy: Callable[..., Path], open_model: Open) -> None:
    """What a router might say of three rows: the cut at the staging slots must fall on the least wanted."""
    gate = next_gate_of(open_model(toy("mixtral"), "half", prefetch="next-gate"))
    logits = torch.zeros(3, zoo.EXPERTS)
    index = torch.tensor([[0, 7], [2, 6], [7, 1]])
    weights = torch.tensor([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]])
    assert gate.named(1, (logits, weights, index), Grading()).experts == [7, 2, 6, 0, 1]
    assert gate.named(1, (index, weights, logits), Grading()).experts == [7, 2, 6, 0, 1], "granitemoe's order"
    assert gate.named(1, (logits, weights, index), Grading(), [0, 1]).experts == [7, 2, 6, 0], (
        "the third row belongs to nobody"
    )
    assert gate.named(1, (logits, weights[:1].flip(1), index[:1].flip(1)), Grading()).experts == [7, 0]


def test_an_expert_is_guessed_in_the_format_that_its_importance_asks_for(
    toy: Callable[..., Path], open_model: Open
) -> None:
    """Unimportance by hand: 0, .5, .8 and .95 in the first row; what another row needs more is neither."""
    gate = next_gate_of(open_model(toy("mixtral"), "half", prefetch="next-gate"))
    grading = Grading(thresholds=Thresholds(0.6, 0.9))
    index = torch.tensor([[3, 0, 5, 6], [5, 1, 0, 2]])
    weights = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.7, 0.25, 0.03, 0.02]])
    logits = torch.zeros(2, zoo.EXPERTS)

    def guessed(weights: torch.Tensor, rows: list[int] | None) -> tuple[list[int], set[int]]:
        found = gate.named(1, (logits, weights, index), grading, rows)
        return list(found.experts), set(found.low) & set(found.experts)

    assert guessed(weights, [0]) == ([3, 0, 5], {5})
    assert guessed(weights, None) == ([5, 3, 0, 1], {1})
    assert guessed(0.5 * weights, [0]) == ([3, 0, 5], {5}), "shares count, whatever the weights add up to"


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "qwen3_moe"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_best_come_first(rows: int, family: str, toy: Callable[..., Path], open_model: Open) -> None:
    """Routers that leave their choice unsorted among them: what is predicted is ranked by what they say."""
    model = open_model(toy(family), "half", prefetch="next-gate", max_sequences=3)
    gate, modules = next_gate_of(model), dict(model.named_modules())
    hidden = torch.randn(rows, 64, generator=torch.Generator().manual_seed(5)).to(model.dtype)
    asked = 0
    for layer, after in gate._following.items():
        if after in model.offload.anatomy.gates:
            _, weights, index = in_order(modules[model.offload.anatomy.gates[after]](hidden))
            assert gate.predict(Sight(layer, hidden)) == (Prediction(after, by_hand(index, weights.float())),)
            asked += 1
    assert asked or not model.offload.anatomy.gates


def test_finished_rows_are_not_guessed_for(toy: Callable[..., Path], open_model: Open) -> None:
    """A row that only pads wants no experts."""
    model = open_model(toy("mixtral"), "half", prefetch="next-gate", max_sequences=2)
    gate = next_gate_of(model)
    hidden = torch.randn(2, 64).to(model.dtype)
    assert gate.predict(Sight(0, hidden, None, [1])) == gate.predict(Sight(0, hidden[1:]))


class Heard:
    """Hooks of a user's on every module of a model: how often each fires."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.counts: Counter[str] = Counter()
        for name, module in model.named_modules():
            module.register_forward_hook(self._note(name))
            module.register_forward_pre_hook(self._note(name))

    def _note(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any = None) -> None:
            self.counts[name] += 1

        return hook


def answers(model: PreTrainedModel, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a prompt and some tokens after it give, all that can be asked for asked for."""
    found, cache = [], None
    for call in calls:
        out = model(**call, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append({name: value for name, value in out.items() if name != "past_key_values"})
    return found


def assert_equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b)
    else:
        assert torch.equal(ours, theirs)


def late(move: Callable[..., int]) -> Callable[..., int]:
    """Reads that end after the resident experts are done."""

    def moved(*args: Any) -> int:
        time.sleep(2e-3)
        return move(*args)

    return moved


PREDICTING: list[dict[str, Any]] = [
    {"prefetch": "next-gate"},
    {"prefetch": "look-ahead"},
    {"prefetch": "stacked-gates"},
    {"prefetch": "look-ahead", "device": "emulated", "dilation": 1.0},
]


@pytest.mark.parametrize("switches", PREDICTING, ids=["next gate", "look-ahead", "stacked gates", "beside a device"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_predictions_are_in_no_output(
    family: str,
    switches: dict[str, Any],
    toy: Callable[..., Path],
    open_model: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss, auxiliary loss, router logits and hidden states of the unmodified model, tensor for tensor; also where
    whole layers are run ahead while the library records them."""
    for mover in (SlotMover, HostMover):
        monkeypatch.setattr(mover, "move", late(mover.move))
    monkeypatch.setattr(LookAheadTrial, "fits", lambda self, loads: loads > 0)
    folder = toy(family)
    model, theirs = open_model(folder, "fifth", **switches), oracle.reference(folder)
    oracle.greedy(model, new_tokens=4)  # a look-ahead has its proof
    predictor = model.offload.executor.prefetching.predictors[Phase.DECODE]
    peeks = getattr(predictor, "peeks", 0)
    asked = {"output_router_logits": True, "output_hidden_states": True}
    calls: list[dict[str, Any]] = [{"input_ids": oracle.PROMPT, "labels": oracle.PROMPT, **asked}]
    calls += [{"input_ids": torch.tensor([[token]]), **asked} for token in (5, 9, 23)]
    with torch.no_grad():
        for ours, expected in zip(answers(model, calls), answers(theirs, calls), strict=True):
            assert ours.keys() == expected.keys()
            for name, value in expected.items():
                assert_equal(ours[name], value)
    assert model.offload.stats().prefetches > 0
    if switches["prefetch"] == "look-ahead":
        assert predictor.peeks > peeks


@pytest.mark.parametrize("switches", PREDICTING, ids=["next gate", "look-ahead", "stacked gates", "beside a device"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "granitemoe"])
def test_hooks_fire_as_often_as_without_us(
    family: str,
    switches: dict[str, Any],
    toy: Callable[..., Path],
    open_model: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On every module: gates, norms, attention, and what lies in them; also where whole layers are run ahead."""
    for mover in (SlotMover, HostMover):
        monkeypatch.setattr(mover, "move", late(mover.move))  # a look-ahead runs only while something is waited for,
    monkeypatch.setattr(LookAheadTrial, "fits", lambda self, loads: loads > 0)  # and here whatever the clock says
    folder = toy(family)
    model, theirs = open_model(folder, "fifth", **switches), oracle.reference(folder)
    oracle.greedy(model, new_tokens=4)
    before = model.offload.stats()
    heard, expected = Heard(model), Heard(theirs)
    for one in (model, theirs):
        one.generate(oracle.PROMPT, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    names = expected.counts.keys() - {name for name in expected.counts if ".experts." in name}
    assert {name: heard.counts[name] for name in names} == {name: expected.counts[name] for name in names}
    interval = model.offload.stats() - before
    assert interval.prefetches > 0
    if switches["prefetch"] == "look-ahead":
        assert interval.look_aheads > 0
        if family != "granitemoe":
            assert model.offload.executor.prefetching.predictors[Phase.DECODE].peeks > 0


def test_hooks_on_everything_stop_predictions(toy: Callable[..., Path], open_model: Open) -> None:
    """A hook that torch keeps for all modules of the process cannot be spared one of them."""
    folder, fired = toy("mixtral"), Counter[str]()
    model = open_model(folder, "half", prefetch="next-gate")
    note = lambda module, *_: fired.update([type(module).__name__])  # noqa: E731
    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        model(oracle.PROMPT)
    finally:
        handle.remove()
    assert fired["MixtralTopKRouter"] == len(zoo.sparse_layers(model))
    assert model.offload.stats().prefetches == 0
    model(oracle.PROMPT)
    assert model.offload.stats().prefetches > 0
