"""One token through a decoder layer in one work: the bits of its parts one by one, and the library's way elsewhere.

Would catch another rounding of the rotary embedding, a head that takes its neighbour's numbers, a position that is
written or read one place off, a layer of another structure, and a way that somebody looks into being gone past.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
)

from smoe.fastpath import fast_layer
from smoe.kernels.spinning_pool import SpinningPool
from smoe.models.kv_cache import RowCache
from tests import oracle, promised
from tests.fastpath.layers import IDS, MODELS, PROMPT, adopt, logits, model_of, quantise

OTHERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "norms of all heads together": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 4, "num_experts_per_tok": 2}),
    "a factor before each sum": (GraniteMoeConfig, GraniteMoeForCausalLM, {"num_local_experts": 4,
                                                                           "residual_multiplier": 0.5}),
    "norms of another formula": (GemmaConfig, GemmaForCausalLM, {"head_dim": 32}),
}  # fmt: skip


def taken_back(model: PreTrainedModel) -> None:
    """The layers' own forward again."""
    for module in model.modules():
        if isinstance(getattr(module.__dict__.get("forward"), "__self__", None), fast_layer.FastLayer):
            del module.forward


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every layer and token that goes through the work."""
    seen: list[int] = []
    one_token = fast_layer.FastLayer.one_token

    def noted(self: Any, *args: Any) -> torch.Tensor:
        seen.append(self.index)
        return one_token(self, *args)

    monkeypatch.setattr(fast_layer.FastLayer, "one_token", noted)
    return seen


@pytest.mark.parametrize("is_quantised", [False, True], ids=["bf16", "8 bits"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_are_those_of_the_parts(
    kind: str, is_quantised: bool, own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(*MODELS[kind])
    if is_quantised:
        quantise(model)
    assert len(adopt(model, own_order)) == 2
    seen = calls(monkeypatch)
    ours = [logits(model), logits(model, start=3)]
    assert len(seen) == 4 * (IDS.shape[1] - PROMPT)
    taken_back(model)
    theirs = logits(model)
    assert len(seen) == 4 * (IDS.shape[1] - PROMPT)
    assert all(all(map(torch.equal, each, theirs)) for each in ours)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_go_the_librarys_way(kind: str, own_order: SpinningPool) -> None:
    model = model_of(*OTHERS[kind])
    assert not adopt(model, own_order)


def test_a_layer_that_does_something_more_is_found_out(
    own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and shapes are all as known: only comparing tells."""
    model = model_of(*MODELS["norms of heads"])
    (of_layer,) = {type(layer) for layer in model.model.layers}
    forward = of_layer.forward
    monkeypatch.setattr(of_layer, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 2)
    assert not adopt(model, own_order)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "dots1"])
def test_whole_models_are_exact(
    family: str, toy: Callable[..., Path], open_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the products have the library's order."""
    seen = calls(monkeypatch)
    folder = toy(family, dtype=torch.bfloat16, hidden_size=256, head_dim=64)
    model = open_model(folder, "minimum", kernels="native")
    oracle.assert_same_steps(oracle.greedy(model), oracle.reference_steps(folder))
    promised.needs(bool(seen), "the library's order of the sums of this layer's parts")


@pytest.fixture
def adopted(own_order: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> tuple[PreTrainedModel, list[int]]:
    """A model, and what goes through the work."""
    model = model_of(*MODELS["norms of heads"])
    assert len(adopt(model, own_order)) == 2
    return model, calls(monkeypatch)


def test_several_rows_and_masks_go_the_librarys_way(adopted: tuple[PreTrainedModel, list[int]]) -> None:
    model, seen = adopted
    logits(model, IDS.repeat(2, 1))
    mask = torch.ones(1, IDS.shape[1], dtype=torch.long)
    mask[0, 0] = 0
    cache = RowCache(model.config, 1, IDS.shape[1])
    with torch.no_grad():
        for begin, end in ((0, PROMPT), (PROMPT, PROMPT + 1)):
            cache.begin(end - begin, 1)
            model(input_ids=IDS[:, begin:end], past_key_values=cache, attention_mask=mask[:, :end])
            cache.commit()
        model(input_ids=IDS[:, :1])  # without a cache
    assert not seen


def test_what_is_hooked_is_called(adopted: tuple[PreTrainedModel, list[int]]) -> None:
    model, seen = adopted
    called = []
    hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *_: called.append(1))
    logits(model)
    hook.remove()
    assert len(called) == 1 + IDS.shape[1] - PROMPT
    assert set(seen) == {0}


def test_what_is_replaced_is_used(adopted: tuple[PreTrainedModel, list[int]]) -> None:
    """As adapters replace layers."""
    model, seen = adopted
    before = logits(model)
    seen.clear()
    inner = model.model.layers[0].self_attn
    inner.o_proj = nn.Sequential(inner.o_proj, nn.Identity())
    assert all(map(torch.equal, logits(model), before))
    assert set(seen) == {1}


def test_attentions_can_be_asked_for(adopted: tuple[PreTrainedModel, list[int]]) -> None:
    model, _ = adopted
    cache = RowCache(model.config, 1, 8)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for begin, end in ((0, 3), (3, 4)):
            cache.begin(end - begin, 1)
            output = model(input_ids=IDS[:, begin:end], past_key_values=cache, output_attentions=True)
            cache.commit()
    assert [tuple(each.shape) for each in output.attentions] == [(1, 4, 1, 4)] * 2


def test_weights_may_move(adopted: tuple[PreTrainedModel, list[int]]) -> None:
    """A parameter's data is another tensor than in the proof."""
    model, seen = adopted
    before = logits(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.clone()
        layer.input_layernorm.weight.data = layer.input_layernorm.weight.data.clone()
        layer.self_attn.k_norm.weight = nn.Parameter(layer.self_attn.k_norm.weight.clone(), requires_grad=False)
    torch.full((1 << 20,), float("nan"))  # where they were
    assert all(map(torch.equal, logits(model), before))
    assert seen
