"""One token through a decoder layer in one work: the bits of its parts one by one, and the library's way elsewhere.

Would catch another rounding of the rotary embedding, a head that takes its neighbour's numbers, a position that is
written or read one place off, a layer of another structure, and a way that somebody looks into being gone past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from smoe.bounds import INT8
from smoe.fastpath import attention, decoder_layer, linear, norm
from smoe.formats.registry import FORMATS
from smoe.kernels.spinning_pool import SpinningPool
from smoe.models.kv_cache import RowCache
from smoe.models.quantised_linear import keep_quantised
from smoe.packing.quantiser import quantised
from tests import oracle, promised

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "norms of heads": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
                                                             "moe_intermediate_size": 32}),
    "no norms of heads": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "head_dim": 32}),
    "biases": (Qwen2MoeConfig, Qwen2MoeForCausalLM, {"num_experts": 4, "moe_intermediate_size": 32,
                                                     "shared_expert_intermediate_size": 32}),
    "a part turned": (Glm4MoeConfig, Glm4MoeForCausalLM, {"head_dim": 64, "partial_rotary_factor": 0.5,
                                                          "n_routed_experts": 4, "num_experts_per_tok": 2,
                                                          "moe_intermediate_size": 32, "first_k_dense_replace": 1}),
}  # fmt: skip
OTHERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "norms of all heads together": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 4, "num_experts_per_tok": 2}),
    "a factor before each sum": (GraniteMoeConfig, GraniteMoeForCausalLM, {"num_local_experts": 4,
                                                                           "residual_multiplier": 0.5}),
    "norms of another formula": (GemmaConfig, GemmaForCausalLM, {"head_dim": 32}),
}  # fmt: skip
IDS = torch.randint(96, (1, 12), generator=torch.Generator().manual_seed(0))
PROMPT = 7


@pytest.fixture(scope="module")
def pool() -> Iterator[SpinningPool]:
    """In our own order, which every CPU with our kernels has."""
    promised.needs_machine_code()
    with SpinningPool(2, in_own_order=True) as made:
        yield made


def model_of(config: type, make: type, more: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = make(config(**(SIZES | more))).bfloat16().eval().requires_grad_(False)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.weight.copy_(1 + 0.3 * torch.randn_like(module.weight))
    return model


def quantise(model: PreTrainedModel) -> None:
    """The projections of attention, as files in 8 bits have them."""
    form = FORMATS["Q8_0"]
    for name, weight in list(model.named_parameters()):
        if "_proj.weight" in name and "self_attn" in name:
            keep_quantised(model, name, form, quantised(weight.float(), form)[0], torch.bfloat16)


def adopt(model: PreTrainedModel, pool: SpinningPool) -> int:
    """All parts, then the layers; returns how many of these."""
    norms = norm.speed_up(model)
    attention.speed_up(model, pool, is_measured=False)
    linears = linear.speed_up(model, pool, {}, INT8, is_measured=False).parts
    return decoder_layer.speed_up(model, pool, decoder_layer.Adopted(linears, norms))


def taken_back(model: PreTrainedModel) -> None:
    """The layers' own forward again."""
    for module in model.modules():
        if isinstance(getattr(module.__dict__.get("forward"), "__self__", None), decoder_layer.OneToken):
            del module.forward


def logits(model: PreTrainedModel, ids: torch.Tensor = IDS, start: int = 0, **more: Any) -> list[torch.Tensor]:
    """Of a prompt's last token, then of one token after the other; `start`: its place in the cache."""
    cache = RowCache(model.config, ids.shape[0], start + ids.shape[1])
    cache.start = start
    found = []
    with torch.no_grad():
        for begin, end in ((0, PROMPT), *((n, n + 1) for n in range(PROMPT, ids.shape[1]))):
            cache.begin(end - begin, ids.shape[0])
            output = model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, **more)
            cache.commit()
            found.append(output.logits[:, -1])
    return found


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every layer and token that goes through the work."""
    seen: list[int] = []
    one_token = decoder_layer.OneToken.one_token

    def noted(self: Any, *args: Any) -> torch.Tensor:
        seen.append(self.index)
        return one_token(self, *args)

    monkeypatch.setattr(decoder_layer.OneToken, "one_token", noted)
    return seen


@pytest.mark.parametrize("is_quantised", [False, True], ids=["bf16", "8 bits"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_are_those_of_the_parts(
    kind: str, is_quantised: bool, pool: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(*MODELS[kind])
    if is_quantised:
        quantise(model)
    assert adopt(model, pool) == 2
    seen = calls(monkeypatch)
    ours = [logits(model), logits(model, start=3)]
    assert len(seen) == 4 * (IDS.shape[1] - PROMPT)
    taken_back(model)
    theirs = logits(model)
    assert len(seen) == 4 * (IDS.shape[1] - PROMPT)
    assert all(all(map(torch.equal, each, theirs)) for each in ours)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_go_the_librarys_way(kind: str, pool: SpinningPool) -> None:
    model = model_of(*OTHERS[kind])
    assert adopt(model, pool) == 0


def test_a_layer_that_does_something_more_is_found_out(pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and shapes are all as known: only comparing tells."""
    model = model_of(*MODELS["norms of heads"])
    (of_layer,) = {type(layer) for layer in model.model.layers}
    forward = of_layer.forward
    monkeypatch.setattr(of_layer, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 2)
    assert adopt(model, pool) == 0


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
def adopted(pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> tuple[PreTrainedModel, list[int]]:
    """A model, and what goes through the work."""
    model = model_of(*MODELS["norms of heads"])
    assert adopt(model, pool) == 2
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
