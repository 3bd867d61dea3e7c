"""Every family's scoring rule, proven on its own router, and what happens where none fits.

Would catch: a substitute that weighs what the router would never have given it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from smoe.errors import UnsupportedModelError
from smoe.models.scoring import ScoringRule, find_rule, in_order
from tests import oracle, zoo

UNKNOWN = {"phimoe"}
"""Two masked softmaxes whose weights depend on the order of the choice: no rule of ours."""


@pytest.mark.parametrize("family", [f for f in zoo.FAMILIES if f not in UNKNOWN])
def test_the_rule_gives_the_routers_own_choice_and_weights(
    family: str, toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    """On hidden states of a real pass, not on those of the proof."""
    model = open_model(toy(family), "full", eviction="score")
    engine, heard = model.offload, []
    modules = dict(model.named_modules())
    assert engine.rules.keys() == engine.anatomy.routers.keys()
    for layer, name in engine.anatomy.routers.items():
        note = lambda _, __, out, layer=layer: heard.append((layer, out))  # noqa: E731
        modules[name].register_forward_hook(note)
    model(input_ids=oracle.PROMPT)
    assert {layer for layer, _ in heard} == engine.rules.keys()
    for layer, output in heard:
        logits, weights, index = in_order(output)
        rule = engine.rules[layer]
        scores = rule.scores(logits)
        chosen = rule.choice(scores).topk(index.shape[1], dim=-1).indices
        assert torch.equal(chosen.sort(dim=-1).values, index.sort(dim=-1).values)
        torch.testing.assert_close(rule.weights(scores, index, weights.dtype), weights, rtol=1e-4, atol=1e-6)
        if rule.ranks_by_scores:
            rows = [
                [row[expert] for expert in chosen] for row, chosen in zip(scores.tolist(), index.tolist(), strict=True)
            ]
            ours = torch.tensor([rule.weights_of(row) for row in rows])
            torch.testing.assert_close(ours, rule.weights(scores, index, torch.float32), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("switches", [{"alpha": 0.2}, {"eviction": "score"}])
def test_an_unknown_rule_is_refused_with_a_way_out(
    switches: dict[str, float], toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel]
) -> None:
    with pytest.raises(UnsupportedModelError, match="without `alpha`"):
        open_model(toy("phimoe"), "half", **switches)


class Router(nn.Module):
    """Softmax, top two, not normalised; `twist` spoils the weights."""

    def __init__(self, twist: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 16))
        self.twist = twist

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x @ self.weight.t()
        values, index = logits.softmax(-1).topk(2, dim=-1)
        return logits, values**self.twist, index


def test_weights_of_another_rule_are_noticed() -> None:
    plain = find_rule(Router(1.0), nn.Module(), hidden=16, experts=6, top_k=2, layer=0)
    assert (plain.score, plain.weight, plain.bias, plain.groups) == ("softmax", "score", None, None)
    assert plain.scale == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(UnsupportedModelError, match="layer 0"):
        find_rule(Router(1.1), nn.Module(), hidden=16, experts=6, top_k=2, layer=0)


def test_no_expert_weighs_nothing() -> None:
    rule = ScoringRule("softmax", "share", 2.0)
    scores = torch.tensor([[0.5, 0.3, 0.2]])
    weights = rule.weights(scores, torch.tensor([[0, 3]]), torch.float32)
    assert torch.equal(weights, torch.tensor([[2.0, 0.0]]))
