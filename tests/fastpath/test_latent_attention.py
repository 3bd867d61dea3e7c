"""Attention of one token on latent vectors: as near to float64 as transformers' own way, and only where it may be.

Would catch: a matrix that is not transposed, a head that takes its neighbour's matrix, hidden positions that count,
rows of a batch that are mixed up, prompts that are computed in another way, a cache that is expanded after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
)

from smoe.bounds import INT8
from smoe.fastpath import attention, latent_attention, linear
from smoe.fastpath.rows_of_pass import RowsOfPass
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.verdicts import Verdicts
from smoe.models.quantised_linear import QuantisedLinear
from tests import promised
from tests.fastpath.layers import IDS, model_of, quantise

LATENT = {
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM, {"q_lora_rank": None}),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, {"q_lora_rank": 64}),
    "deepseek_v32": (
        DeepseekV32Config,
        DeepseekV32ForCausalLM,
        {"q_lora_rank": 64, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 6},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, {"q_lora_rank": 64}),
}
PROMPT = 7


@pytest.fixture(scope="module")
def pool() -> Iterator[SpinningPool]:
    promised.needs(widest() is not None, "machine code of our own")
    with SpinningPool(2, in_own_order=True) as made:
        yield made


def made(family: str) -> PreTrainedModel:
    config, make, more = FAMILIES[family]
    return model_of(config, make, LATENT | more | {"experts_implementation": "eager"})


def adopted(family: str, pool: SpinningPool) -> PreTrainedModel:
    model = made(family)
    layers = model.config.num_hidden_layers
    assert attention.speed_up_latent(model, pool, Verdicts()) == layers
    return model


def steps(model: PreTrainedModel, ids: torch.Tensor = IDS, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of a prompt, then of one token after the other."""
    found, cache = [], None
    with torch.no_grad():
        for begin, end in ((0, PROMPT), *((n, n + 1) for n in range(PROMPT, ids.shape[1]))):
            seen = None if mask is None else mask[:, :end]
            out = model(ids[:, begin:end], past_key_values=cache, use_cache=True, attention_mask=seen)
            cache = out.past_key_values
            found.append(out.logits.double())
    return torch.cat(found, 1)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact)[:, PROMPT:].square().mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_is_as_near_to_float64_as_transformers_own(family: str, pool: SpinningPool) -> None:
    ours, theirs = steps(adopted(family, pool)), steps(made(family))
    exact = steps(made(family).double())
    assert not torch.equal(ours[:, PROMPT:], theirs[:, PROMPT:]), "the way was not taken"
    assert error(ours, exact) <= 1.6 * error(theirs, exact)
    assert torch.equal(ours[:, :PROMPT], theirs[:, :PROMPT]), "a prompt is computed as before"


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_layers(family: str, pool: SpinningPool) -> None:
    """As from a file in 8 bits, with activations in 8 bits. Would catch codes that are read as if they were weights."""
    plain, ours, theirs = made(family), made(family), made(family)
    for model in (ours, theirs):
        quantise(model)
        linear.multiply_codes(model, pool, INT8)
    for name, module in ours.named_modules():
        if isinstance(module, QuantisedLinear):
            plain.get_submodule(name).weight.copy_(module.weight)
    assert isinstance(ours.model.layers[0].self_attn.kv_b_proj, QuantisedLinear)
    assert attention.speed_up_latent(ours, pool, Verdicts()) == ours.config.num_hidden_layers
    exact = steps(plain.double())
    assert error(steps(ours), exact) <= 1.2 * error(steps(theirs), exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_is_not_expanded_for_a_token(
    family: str, pool: SpinningPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expanded: list[int] = []
    module = type(made(family).model.layers[0].self_attn)
    library = module.expand_kv

    def noted(self: nn.Module, latent: torch.Tensor, rotated: torch.Tensor) -> Any:
        expanded.append(latent.shape[2])
        return library(self, latent, rotated)

    monkeypatch.setattr(module, "expand_kv", noted)
    model = adopted(family, pool)
    expanded.clear()
    steps(model)
    assert set(expanded) == {PROMPT}


def test_hidden_positions_do_not_count(pool: SpinningPool) -> None:
    model = adopted("deepseek_v3", pool)
    mask = torch.ones_like(IDS)
    mask[:, :3] = 0
    masked, theirs = steps(model, mask=mask), steps(made("deepseek_v3"), mask=mask)
    exact = steps(made("deepseek_v3").double(), mask=mask)
    assert error(masked, exact) <= 1.6 * error(theirs, exact)
    assert error(steps(model), exact) > 4 * error(masked, exact), "the mask makes a difference"


def test_rows_of_a_batch_are_computed_as_before(pool: SpinningPool) -> None:
    ids = torch.cat((IDS, IDS.flip(1)))
    assert torch.equal(steps(adopted("deepseek_v3", pool), ids), steps(made("deepseek_v3"), ids))


def test_separate_texts_of_a_pass_are_computed_one_by_one(pool: SpinningPool) -> None:
    ids, model = torch.cat((IDS, IDS.flip(1))), adopted("deepseek_v3", pool)
    rows = RowsOfPass(pool, is_quantised=True, is_reproducible=False)
    assert attention.listen_to(rows, model)
    cache = model(ids[:, :PROMPT], use_cache=True).past_key_values
    with torch.no_grad(), rows.apart([PROMPT + 1] * 2, 1):
        together = model(ids[:, PROMPT : PROMPT + 1], past_key_values=cache, use_cache=True).logits
    alone = torch.cat([steps(model, row)[:, PROMPT : PROMPT + 1] for row in ids.split(1)])
    assert torch.allclose(together.double(), alone, atol=0.05)


def test_a_wrong_kernel_is_refused(pool: SpinningPool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = latent_attention.LatentQuery.__call__
    monkeypatch.setattr(latent_attention.LatentQuery, "__call__", lambda *given: 1.02 * kernel(*given))
    model = made("deepseek_v3")
    assert attention.speed_up_latent(model, pool, Verdicts()) == 0
    assert latent_attention.kernel_of(model.model.layers[0].self_attn) is None


class Adapted(nn.Module):
    """A layer that an adapter stands before."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * 2


def _stand_before(attention: nn.Module) -> None:
    attention.kv_b_proj = Adapted(attention.kv_b_proj)


def _merge(attention: nn.Module) -> None:
    attention.kv_b_proj.weight.data *= 2


def _hook(attention: nn.Module) -> None:
    attention.kv_b_proj.register_forward_hook(lambda module, given, output: output * 2)


@pytest.mark.parametrize("change", [_stand_before, _merge, _hook])
def test_a_changed_weight_counts(change: Callable[[nn.Module], None], pool: SpinningPool) -> None:
    """Would catch a prompt with an adapter, and tokens after it without."""
    ours, theirs = adopted("deepseek_v3", pool), made("deepseek_v3")
    for model in (ours, theirs):
        for layer in model.model.layers:
            change(layer.self_attn)
    assert torch.equal(steps(ours), steps(theirs))


def test_another_attention_function_gets_keys_and_values(pool: SpinningPool) -> None:
    ours, theirs = adopted("deepseek_v3", pool), made("deepseek_v3")
    for model in (ours, theirs):
        model.set_attn_implementation("eager")
    assert torch.equal(steps(ours), steps(theirs))
