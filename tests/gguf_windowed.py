"""Toys of architectures in which some layers see only the last tokens, as `gguf_converted.py` has the others."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import gguf_converted as converted
from tests import gguf_sparse as sparse
from tests.gguf_converted import Architecture, Tensors, usual

_SLIDING = ["sliding_attention", "full_attention"] * 2
_MIXED = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
_DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
_NEAR = {"rope_type": "default", "rope_theta": 3000.0, "partial_rotary_factor": 1.0}
_FAR = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
_SCALED = {
    **_FAR,
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "attention_factor": 1.125,
}


def _heads_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}


def _pattern(config: PretrainedConfig) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _rope_metadata(config: PretrainedConfig) -> dict[str, Any]:
    """What the converter writes of rotary embeddings of two kinds."""
    far, near = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
    found = {"rope.freq_base": far["rope_theta"], "rope.freq_base_swa": near["rope_theta"]}
    if far["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": far["factor"],
            "rope.scaling.original_context_length": far["original_max_position_embeddings"],
            "rope.scaling.yarn_attn_factor": far["attention_factor"],
            "rope.scaling.yarn_beta_fast": far["beta_fast"],
            "rope.scaling.yarn_beta_slow": far["beta_slow"],
        }
    return found


def _mimo(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    yield from (("attn_sinks.weight", weight),) if rest == "self_attn.sinks" else usual(rest, weight, config)


def _mimo_metadata(config: PretrainedConfig) -> dict[str, Any]:
    """The release has twice as many key-value heads in layers with a window, and leaves the token itself out of it."""
    heads = config.num_key_value_heads
    return {
        **_rope_metadata(config),
        "attention.head_count_kv": [2 * heads if each else heads for each in _pattern(config)],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.value_scale": config.attention_value_scale,
        "attention.sliding_window": config.sliding_window - 1,
        "attention.sliding_window_pattern": _pattern(config),
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "rope.dimension_count": int(config.head_dim * 0.5),
    }


MIMO = Architecture(
    "mimo2",
    "mimo_v2_flash",
    {
        "attention_value_scale": 0.75,
        "head_dim": 16,
        "v_head_dim": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "layer_types": _MIXED,
        "mlp_layer_types": _DENSE_FIRST,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "rope_parameters": {"full_attention": _FAR, "sliding_attention": {**_NEAR, "partial_rotary_factor": 0.5}},
    },
    _mimo,
    _mimo_metadata,
    unsaid=frozenset({"routed_scaling_factor", "norm_topk_prob"}),
)


def _hy_v3(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    is_correction = rest == "mlp.e_score_correction_bias"
    yield from (("exp_probs_b", weight),) if is_correction else usual(rest, weight, config)


def _hy_v3_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **_heads_metadata(config),
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_intermediate_size * config.num_shared_experts,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": config.router_scaling_factor,
    }


HY_V3 = Architecture(
    "hy_v3",
    "hy_v3",
    {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "head_dim": 16,
        "intermediate_size": 96,
        "mlp_layer_types": _DENSE_FIRST,
        "num_shared_experts": 2,
        "router_scaling_factor": 1.5,
    },
    _hy_v3,
    _hy_v3_metadata,
)


def _cohere_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **_heads_metadata(config),
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": _pattern(config),
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}[config.expert_selection_fn],
        "expert_shared_count": config.num_shared_experts or None,
        "expert_shared_feed_forward_length": config.intermediate_size * config.num_shared_experts or None,
        "expert_weights_norm": config.norm_topk_prob,
        "feed_forward_length": config.prefix_dense_intermediate_size,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "logit_scale": config.logit_scale,
        "rope.dimension_count": config.head_dim,
        "rope.scaling.type": "none",
        "vocab_size": config.vocab_size,
    }


_COHERE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "rms_norm_eps": None,
    "layer_norm_eps": 1e-4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": _DENSE_FIRST,
    "prefix_dense_intermediate_size": 96,
    "num_shared_experts": 2,
    "expert_selection_fn": "sigmoid",
    "logit_scale": 0.25,
}
COHERE = Architecture(
    "cohere2moe", "cohere2_moe", _COHERE, usual, _cohere_metadata, "cohere2moe", frozenset({"rope_theta"})
)
COHERE_SOFTMAX = COHERE._replace(
    config={**_COHERE, "rms_norm_eps": 1e-4, "num_shared_experts": 0, "expert_selection_fn": "softmax"},
)


def _laguna(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    yield from (("attn_gate.weight", weight),) if rest == "self_attn.g_proj.weight" else usual(rest, weight, config)


def _laguna_metadata(config: PretrainedConfig) -> dict[str, Any]:
    """Nothing of which layers have a window."""
    return {
        **_heads_metadata(config),
        **_rope_metadata(config),
        "attention.head_count": config.num_attention_heads_per_layer,
        "attention.sliding_window": config.sliding_window or None,
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": config.moe_routed_scaling_factor,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "rope.dimension_count": int(config.head_dim * 0.5),
        "rope.dimension_count_swa": config.head_dim,
        "vocab_size": config.vocab_size,
    }


_LAGUNA: dict[str, Any] = {
    "gating": "per-head",
    "head_dim": 16,
    "intermediate_size": 96,
    "layer_types": _MIXED,
    "mlp_layer_types": _DENSE_FIRST,
    "moe_routed_scaling_factor": 1.5,
    "num_attention_heads_per_layer": [4, 2, 2, 2],
    "rope_parameters": {"full_attention": _SCALED, "sliding_attention": _NEAR},
}
LAGUNA = Architecture("laguna", "laguna", _LAGUNA, _laguna, _laguna_metadata, "laguna")
LAGUNA_M = LAGUNA._replace(
    config={
        **_LAGUNA,
        "gating": "per-element",
        "layer_types": ["full_attention"] * 4,
        "num_attention_heads_per_layer": [4] * 4,
        "sliding_window": 0,
    }
)


def _mellum_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **_heads_metadata(config),
        **_rope_metadata(config),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": _pattern(config),
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


MELLUM = Architecture(
    "mellum",
    "mellum",
    {
        "head_dim": 16,
        "layer_types": _SLIDING,
        "rope_parameters": {
            "full_attention": {**_SCALED, "partial_rotary_factor": 1.0},
            "sliding_attention": _NEAR,
        },
    },
    usual,
    _mellum_metadata,
    "mellum2",
)


def _granite_swa(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """Gate and up stay together."""
    whole = {
        "self_attn.sinks": "attn_sinks.weight",
        "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
    }
    yield from ((whole[rest], weight),) if rest in whole else converted.granite(rest, weight, config)


def _granite_swa_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **converted.granite_metadata(config),
        "attention.rope_pattern": [bool(theta) for theta in config.layer_rope_theta],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": _pattern(config),
    }


GRANITE_SWA = Architecture(
    "granite_swa",
    "granitemoe_swa",
    {
        **converted.GRANITE,
        "layer_types": _MIXED,
        "layer_rope_theta": [0.0, 5000.0, 5000.0, 5000.0],
        "shared_intermediate_size": 64,
    },
    _granite_swa,
    _granite_swa_metadata,
    "refact",
)


def _dots3(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """Norms of latents times the factor of their outputs; keys and values apart, of the sizes that the layer has."""
    names = {
        "self_attn.k_rope_only_layernorm.weight": "attn_k_norm.weight",
        "self_attn.g_proj.weight": "attn_gate.weight",
    }
    if rest in ("self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight"):
        weight = weight * (config.hidden_size / len(weight)) ** 0.5
    if rest == "self_attn.kv_b_proj.weight":
        config = config.per_layer_config["sliding_attention" if weight.shape[1] == 32 else "indexed_attention"]
    yield from ((names[rest], weight),) if rest in names else converted.indexed(rest, weight, config)


def _dots3_metadata(config: PretrainedConfig) -> dict[str, Any]:
    near = config.per_layer_config["sliding_attention"]
    turned = near.qk_rope_head_dim
    return {
        **converted.indexed_metadata(config.per_layer_config["indexed_attention"]),
        "attention.head_count": [near.num_attention_heads if each else 4 for each in _pattern(config)],
        "attention.indexer.types": [not each for each in _pattern(config)],
        "attention.key_length_swa": near.kv_lora_rank + turned,
        "attention.value_length_swa": near.kv_lora_rank,
        "attention.key_length_mla_swa": near.qk_nope_head_dim + turned,
        "attention.value_length_mla_swa": near.v_head_dim,
        "attention.kv_lora_rank_swa": near.kv_lora_rank,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": _pattern(config),
        "rope.freq_base": config.rope_parameters["indexed_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }


_DOTS3_LAYERS = ["indexed_attention", "sliding_attention"] * 2
DOTS3 = Architecture(
    "dots3note",
    "dots3_note_text",
    {
        **converted.LATENT,
        "head_dim": 40,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "n_group": 1,
        "topk_group": 1,
        "intermediate_size": 96,
        "shared_experts_intermediate_size": 32,
        "layer_types": _DOTS3_LAYERS,
        "mlp_layer_types": _DENSE_FIRST,
        "norm_topk_prob": True,
        "sliding_window": 8,
        "per_layer_config": {
            str(layer): {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "kv_lora_rank": 32,
                "head_dim": 24,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 32,
            }
            for layer in (1, 3)
        },
        "rope_parameters": {
            "indexed_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
        },
    },
    _dots3,
    _dots3_metadata,
    "qwen2",
)

_ARCHITECTURES: dict[str, Architecture] = {
    "mimo2": MIMO,
    "hy_v3": HY_V3,
    "cohere2moe": COHERE,
    "cohere2moe with softmax": COHERE_SOFTMAX,
    "laguna XS": LAGUNA,
    "laguna M": LAGUNA_M,
    "mellum": MELLUM,
    "granite_swa": GRANITE_SWA,
    "dots3note": DOTS3,
}
TOYS = {
    **converted.ALL,
    **{
        name: family
        for name, family in (_ARCHITECTURES | sparse.ARCHITECTURES).items()
        if family.model_type in CONFIG_MAPPING
    },
}
"""All toys: those of `gguf_converted.py` and `gguf_sparse.py`, and these, of which the installed transformers has a
class."""
