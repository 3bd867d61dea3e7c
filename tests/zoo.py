"""Toy models of 18 Mixture-of-Experts families: hidden 64, 4 layers, 8 experts, seeded random weights.

`make` gives a model, `save` writes one as a checkpoint in the key layout its family is published in. Weights are scaled
so that activations neither vanish nor blow up and routers are undecided enough to use every expert; biases, router
correction biases and attention sinks are non-zero, norm weights differ from one and scale factors are on, so that
leaving any of them out shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from smoe.models.registration import register_local_families

EXPERTS = 8

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_LOCAL_EXPERTS: dict[str, Any] = {"intermediate_size": 32, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
_EXPERTS: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
}
_ROUTED_EXPERTS: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**_LOCAL_EXPERTS, "head_dim": 16, "sliding_window": None},
    "qwen2_moe": {**_EXPERTS, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    "olmoe": {"intermediate_size": 32, "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "phimoe": {**_LOCAL_EXPERTS, "sliding_window": None, "attention_bias": True, "lm_head_bias": True},
    "deepseek_v2": {
        **_ROUTED_EXPERTS,
        **_MLA,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {**_ROUTED_EXPERTS, **_MLA, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "gpt_oss": {
        **_LOCAL_EXPERTS,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    },
    "glm4_moe": {
        **_ROUTED_EXPERTS,
        "head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "minimax_m2": {**_LOCAL_EXPERTS, "head_dim": 16},
    "ernie4_5_moe": {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "moe_num_experts": EXPERTS,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "use_bias": True,
    },
    "granitemoe": {
        **_LOCAL_EXPERTS,
        "embedding_multiplier": 12.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.125,
    },
    "qwen3_next": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 48,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "dots1": {**_ROUTED_EXPERTS, "head_dim": 16, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
    "hunyuan_v1_moe": {"intermediate_size": 32, "num_experts": EXPERTS, "moe_topk": 2, "head_dim": 16},
    "lfm2_moe": {**_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "deepseek": {**_ROUTED_EXPERTS, "n_shared_experts": 2, "num_experts_per_tok": 3},
    "xverse": {"intermediate_size": 32, "num_experts": EXPERTS, "moe_top_k": 3, "num_shared_experts": 2},
}

FAMILIES: tuple[str, ...] = tuple(_CONFIGS)

_GATE_UP_DOWN = "model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight", ("gate_proj", "up_proj", "down_proj")
_W1_W3_W2 = "model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight", ("w1", "w3", "w2")
_LFM2 = "model.layers.{layer}.feed_forward.experts.{expert}.{matrix}.weight", ("w1", "w3", "w2")

FUSED: frozenset[str] = frozenset({"gpt_oss", "granitemoe"})
"""Families published with all experts of a layer in one 3-D tensor; the others have one key per expert and matrix.

gpt_oss: `mlp.experts.gate_up_proj` and `down_proj`, [E, in, out], gate and up interleaved (the released files hold the
same in mxfp4, as `*_blocks` and `*_scales`: `mxfp4_toy.py`). granitemoe: `block_sparse_moe.input_linear.weight` and
`output_linear.weight`, [E, out, in], gate rows first.
"""


def expert_keys(family: str, layer: int, expert: int) -> tuple[str, str, str]:
    """Published checkpoint keys of one expert, as (gate, up, down); only for families outside `FUSED`."""
    assert family not in FUSED, f"{family} is published with fused experts"
    template, matrices = {"mixtral": _W1_W3_W2, "phimoe": _W1_W3_W2, "minimax_m2": _W1_W3_W2, "lfm2_moe": _LFM2}.get(
        family, _GATE_UP_DOWN
    )
    gate, up, down = (template.format(layer=layer, expert=expert, matrix=matrix) for matrix in matrices)
    return gate, up, down


def sparse_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Indices of the layers that have experts."""
    return tuple(
        index
        for index, layer in enumerate(model.model.layers)
        if any(name.endswith(".experts") for name, _ in layer.named_modules())
    )


def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **config_overrides: Any) -> PreTrainedModel:
    """A toy model of `family` in eval mode with eager experts.

    Same arguments, same weights; the global generator is left as it was.
    """
    register_local_families()
    config = AutoConfig.for_model(family, **{**_COMMON, **_CONFIGS[family], **config_overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what only the library sets, such as the decay of linear attention
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    fill(model, dtype, seed)
    ready: PreTrainedModel = model.eval()
    return ready


def fill(model: PreTrainedModel, dtype: torch.dtype, seed: int = 0) -> None:
    """Give a model built in `dtype` its weights, and each the type that the library loads it in."""
    _keep_in_fp32(model, dtype)
    _fill(model, torch.Generator().manual_seed(seed))


def save(
    family: str,
    folder: Path | str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str = "5GB",
    **config_overrides: Any,
) -> Path:
    """Write `make(...)` to `folder` as its family is published; `max_shard_size="100KB"` gives several shards.

    `save_pretrained` undoes the library's fusing of experts, so families outside `FUSED` get one key per expert and
    matrix (tested in test_zoo.py).
    """
    model = make(family, seed, dtype, **config_overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return Path(folder)


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Widen what `from_pretrained` keeps in fp32 (router correction biases and the like); `from_config` does not."""
    patterns = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(pattern in name for pattern in patterns):
            tensor.data = tensor.data.float()


@torch.no_grad()
def _fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Matrices get unit gain; norm weights, biases and sinks move by 0.1 from where the library put them.

    Embeddings are wider, or attention would drown the token's identity and routers would favour the same few experts;
    less so where they are also the output matrix, which would then only repeat the input. Correction biases stay small
    beside the scores they correct, for the same reason.
    """

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    embedding_scale = 0.3 if getattr(model.config, "tie_word_embeddings", False) else 1.0
    for name, parameter in model.named_parameters():
        if "correction_bias" in name:
            parameter.copy_(0.03 * noise(parameter))
        elif parameter.dim() == 1 or name.endswith("bias"):
            parameter.add_(0.1 * noise(parameter))
        else:
            scale = embedding_scale if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(scale * noise(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.copy_(0.03 * noise(buffer))
        if name.endswith("tid2eid"):  # deepseek_v4: the experts of every token, by its number
            buffer.copy_(torch.rand(len(buffer), EXPERTS, generator=generator).topk(buffer.shape[1]).indices)
