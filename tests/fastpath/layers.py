"""Small models whose decoder layers compute one token as one work, and what asks them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from smoe.bounds import INT8
from smoe.fastpath import attention, decoder_layer, fast_layer, linear, norm
from smoe.formats.registry import FORMATS
from smoe.kernels.spinning_pool import SpinningPool
from smoe.models.kv_cache import RowCache
from smoe.models.quantised_linear import keep_quantised
from smoe.packing.quantiser import quantised

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
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
IDS = torch.randint(96, (1, 12), generator=torch.Generator().manual_seed(0))
PROMPT = 7


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
            keep_quantised(
                model, [name.removesuffix(".weight")], form, quantised(weight.float(), form)[0], torch.bfloat16
            )


def adopt(model: PreTrainedModel, pool: SpinningPool) -> dict[nn.Module, fast_layer.FastLayer]:
    """All parts, then the layers; returns these."""
    norms = norm.speed_up(model)
    attention.speed_up(model, pool)
    linears = linear.speed_up(model, pool, {}, INT8, is_measured=False).parts
    return decoder_layer.speed_up(model, pool, linears, norms)


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
