"""Architectures of GGUF files with keys and values in every layer (`gguf_families.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smoe.models.gguf_arrangements import JOINED_SHARED, PAIRED_ROWS
from smoe.models.gguf_family import NEXT_TOKEN_LAYERS, Entries, GgufFamily

SIGMOID = (0, 2)
"""How a router's scores are made: by a sigmoid, also where a file does not say it."""


GRANITE_SIZES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "expert_count": "num_local_experts",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
GRANITE_NAMES = {"block_sparse_moe.router.weight": "ffn_gate_inp.weight"}
_GRANITE_SHARED = GgufFamily(
    "granitemoeshared",
    {**GRANITE_SIZES, "expert_shared_feed_forward_length": "shared_intermediate_size"},
    names=GRANITE_NAMES,
    arrangements={**PAIRED_ROWS, **JOINED_SHARED},
)


def _with_shared_expert(entries: Entries) -> GgufFamily | None:
    return _GRANITE_SHARED if any(".ffn_up_shexp." in key for key in entries.tensors) else None


def _ernie(entries: Entries, fields: dict[str, Any]) -> None:
    fields["moe_layer_end_index"] = fields["num_hidden_layers"] - 1


def _dots(entries: Entries, fields: dict[str, Any]) -> None:
    fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]


FAMILIES: Mapping[str, GgufFamily] = {
    "dots1": GgufFamily(
        "dots1",
        {
            "attention.key_length": "head_dim",
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        fixed={"sliding_window": None},
        allowed={"expert_gating_func": SIGMOID},
        complete=_dots,
    ),
    "ernie4_5-moe": GgufFamily(
        "ernie4_5_moe",
        {
            "expert_count": "moe_num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_used_count": "moe_k",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        complete=_ernie,
        from_tensors={"use_bias": "blk.0.attn_q.bias"},
        split=None,
    ),
    "glm4moe": GgufFamily(
        "glm4_moe",
        {
            "attention.key_length": "head_dim",
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
            "nextn_predict_layers": NEXT_TOKEN_LAYERS,
        },
        fixed={NEXT_TOKEN_LAYERS: 0},
        allowed={"expert_gating_func": SIGMOID},
        from_tensors={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
        has_partial_rotary=True,
        split="glm4",
    ),
    "granitemoe": GgufFamily(
        "granitemoe",
        GRANITE_SIZES,
        names=GRANITE_NAMES,
        arrangements=PAIRED_ROWS,
        variant=_with_shared_expert,
        split="refact",
    ),
    "hunyuan-moe": GgufFamily(
        "hunyuan_v1_moe",
        {
            "attention.key_length": "head_dim",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "intermediate_size",
            "expert_used_count": "moe_topk",
        },
        split="hunyuan",
    ),
    "gpt-oss": GgufFamily(
        "gpt_oss",
        {
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.key_length": "head_dim",
            "attention.sliding_window": "sliding_window",
        },
        fixed_yarn={"truncate": False},
        names={"self_attn.sinks": "attn_sinks.weight"},
        split="gpt-4o",
    ),
    "llama": GgufFamily(
        "mixtral",
        {
            "expert_count": "num_local_experts",
            "rope.dimension_count": "head_dim",
            "attention.key_length": "head_dim",
        },
        arrangements=PAIRED_ROWS,
        split="llama-bpe",
    ),
    "minimax-m2": GgufFamily(
        "minimax_m2",
        {
            "attention.key_length": "head_dim",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        allowed={"expert_gating_func": SIGMOID},
        has_partial_rotary=True,
        split="minimax-m2",
    ),
    "olmoe": GgufFamily(
        "olmoe",
        {"expert_count": "num_experts", "expert_feed_forward_length": "intermediate_size"},
        split="olmo",
    ),
    "qwen2moe": GgufFamily(
        "qwen2_moe",
        {
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
        },
    ),
    "qwen3moe": GgufFamily(
        "qwen3_moe",
        {
            "attention.key_length": "head_dim",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
        },
        fixed={"norm_topk_prob": True},  # the format's own program takes it for granted
    ),
}
