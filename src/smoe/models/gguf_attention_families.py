"""The GGUF architectures whose layers all have ordinary attention to the whole text: a part of the table in
`gguf_families.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from smoe.models.gguf_arrangements import JOINED_DENSE, JOINED_SHARED, LESS_ONE, PAIRED_ROWS, SPLIT_ATTENTION
from smoe.models.gguf_family import NEXT_TOKEN_LAYERS, Entries, GgufFamily, dense_first

SIGMOID = (0, 2)
"""Allowed values of `expert_gating_func` for routers with sigmoid scores: 2, or 0 if the file has no such entry."""

ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
"""Metadata entries of families with DeepSeek-V3's router."""

_DEEPSEEK_SIZES = {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
"""Metadata entries of families that smoe's own class of DeepSeek-MoE computes."""

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
    arrangements={**PAIRED_ROWS, "shared_mlp.input_linear.weight": JOINED_SHARED},
)


def _with_shared_expert(entries: Entries) -> GgufFamily | None:
    return _GRANITE_SHARED if any(".ffn_up_shexp." in key for key in entries.tensors) else None


_QWEN3_SIZES = {
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}


def _ernie(entries: Entries, fields: dict[str, Any]) -> None:
    fields["moe_layer_end_index"] = fields["num_hidden_layers"] - 1


def _dbrx(entries: Entries, fields: dict[str, Any]) -> None:
    """Move the configuration fields into the two nested configurations of transformers' DBRX, under DBRX's names."""
    fields["attn_config"] = {
        "clip_qkv": entries.number("attention.clamp_kqv"),
        "kv_n_heads": fields.pop("num_key_value_heads"),
        "rope_theta": fields["rope_parameters"]["rope_theta"],
    }
    fields["ffn_config"] = {
        "ffn_hidden_size": fields.pop("intermediate_size"),
        "hidden_size": fields["hidden_size"],
        "moe_num_experts": entries.number("expert_count"),
        "moe_top_k": fields.pop("num_experts_per_tok"),
    }
    for ours, theirs in _DBRX.items():
        fields[theirs] = fields.pop(ours)


_DBRX = {
    "hidden_size": "d_model",
    "max_position_embeddings": "max_seq_len",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}


def _dots(entries: Entries, fields: dict[str, Any]) -> None:
    fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]


def _minimax_m3(entries: Entries, fields: dict[str, Any]) -> None:
    count, dense = fields["num_hidden_layers"], entries.number("leading_dense_block_count", 0)
    fields["mlp_layer_types"] = dense_first(dense, count)
    is_sparse = [f"blk.{layer}.indexer.q_proj.weight" in entries.tensors for layer in range(count)]
    fields["layer_types"] = ["minimax_m3_sparse" if each else "full_attention" for each in is_sparse]
    fields["rope_parameters"]["partial_rotary_factor"] = fields["rotary_dim"] / fields["head_dim"]
    fields["shared_intermediate_size"] = fields["intermediate_size"] * entries.number("expert_shared_count", 1)


def _hy_v3(entries: Entries, fields: dict[str, Any]) -> None:
    """Add two fields to the configuration: the layers that have experts, and the number of shared experts, which is
    computed from their total width in the file."""
    fields["mlp_layer_types"] = [
        "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in entries.tensors else "dense"
        for layer in range(fields["num_hidden_layers"])
    ]
    width = fields["moe_intermediate_size"]
    fields["num_shared_experts"] = entries.number("expert_shared_feed_forward_length", width) // width


def _llama4(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields that Llama 4 files lack. Their values are known for the two published models: Scout
    (16 experts, scaled positions) and Maverick (128 experts)."""
    fields["use_qk_norm"] = fields["num_local_experts"] != 128
    if "rope_freqs.weight" in entries.tensors:
        fields["rope_parameters"] |= {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        }


def _llama4_frequencies(config: Any) -> list[float]:
    """Return the factors by which Llama 4's rotary frequencies are divided: the scaling factor for long wavelengths, 1
    for short ones."""
    rope, width = config.rope_parameters, config.head_dim
    lengths = [2 * math.pi * rope["rope_theta"] ** (2 * n / width) for n in range(width // 2)]
    return [rope["factor"] if each > rope["original_max_position_embeddings"] else 1.0 for each in lengths]


FAMILIES: Mapping[str, GgufFamily] = {
    "afmoe": GgufFamily(
        "afmoe",
        {
            "attention.key_length": "head_dim",
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "route_scale",
            "leading_dense_block_count": "num_dense_layers",
        },
        fixed={"global_attn_every_n_layers": 4, "mup_enabled": True, "num_dense_layers": 0},
        allowed={"expert_gating_func": SIGMOID},
        names={"mlp.expert_bias": "exp_probs_b.bias"},
        split="afmoe",
    ),
    "bailingmoe": GgufFamily(
        "deepseek",  # transformers has no class for Ling 1; smoe's class of DeepSeek-MoE computes the same
        {**_DEEPSEEK_SIZES, "attention.key_length": "head_dim", "expert_weights_norm": "norm_topk_prob"},
        fixed={"first_k_dense_replace": 0, "norm_topk_prob": False},
        arrangements=PAIRED_ROWS,
        named_as="deepseek",
        split="bailingmoe",
    ),
    "bailingmoe2": GgufFamily(
        "glm4_moe",  # transformers has no class for Ling 2; glm4_moe computes the same
        {
            **ROUTED,
            "attention.key_length": "head_dim",
            "nextn_predict_layers": NEXT_TOKEN_LAYERS,
        },
        fixed={"n_group": 1, "topk_group": 1, "norm_topk_prob": False, NEXT_TOKEN_LAYERS: 0, "use_qk_norm": True},
        allowed={"expert_gating_func": SIGMOID},
        has_partial_rotary=True,
        arrangements=SPLIT_ATTENTION,
        named_as="glm4moe",
        names={"post_attention_layernorm.weight": "ffn_norm.weight"},
        split="bailingmoe2",
    ),
    "dbrx": GgufFamily("dbrx", {}, read=frozenset({"attention.clamp_kqv"}), complete=_dbrx, split="dbrx"),
    "deepseek": GgufFamily(
        "deepseek",
        _DEEPSEEK_SIZES,
        fixed={"first_k_dense_replace": 0},
        allowed={"expert_weights_norm": (False,)},
        arrangements=PAIRED_ROWS,
        split="deepseek-llm",
    ),
    "dots1": GgufFamily(
        "dots1",
        {
            **ROUTED,
            "attention.key_length": "head_dim",
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
            **ROUTED,
            "attention.key_length": "head_dim",
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
    "hy_v3": GgufFamily(
        "hy_v3",
        {
            "attention.key_length": "head_dim",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "router_scaling_factor",
        },
        fixed={"router_scaling_factor": 1.0},
        allowed={"expert_gating_func": SIGMOID, "expert_weights_norm": (True,)},
        complete=_hy_v3,
        named_as="dots1",
        names={"mlp.e_score_correction_bias": "exp_probs_b"},
        split=None,
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
    "llama4": GgufFamily(
        "llama4_text",
        {
            "attention.key_length": "head_dim",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "feed_forward_length": "intermediate_size_mlp",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        allowed={"attention.sliding_window": (8192,), "expert_gating_func": SIGMOID},
        complete=_llama4,
        implied={"rope_freqs.weight": _llama4_frequencies},
        split="llama4",
    ),
    "minimax-m3": GgufFamily(
        "minimax_m3_vl_text",
        {
            "attention.indexer.block_size": "index_block_size",
            "attention.indexer.head_count": "index_n_heads",
            "attention.indexer.key_length": "index_head_dim",
            "attention.indexer.local_blocks": "index_local_blocks",
            "attention.indexer.top_k": "index_topk_blocks",
            "attention.key_length": "head_dim",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "feed_forward_length": "dense_intermediate_size",
            "rope.dimension_count": "rotary_dim",
        },
        fixed={"routed_scaling_factor": 1.0},
        allowed={"expert_gating_func": SIGMOID},
        read=frozenset({"leading_dense_block_count"}),
        complete=_minimax_m3,
        named_as="minimax-m2",
        names={
            "mlp.down_proj.weight": "ffn_down.weight",
            "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
            **{
                f"self_attn.indexer.{part}.weight": f"indexer.{part}.weight"
                for part in ("q_proj", "k_proj", "q_norm", "k_norm")
            },
        },
        arrangements={
            **dict.fromkeys(
                (
                    "model.norm.weight",
                    "input_layernorm.weight",
                    "post_attention_layernorm.weight",
                    *(f"self_attn.{part}{kind}_norm.weight" for part in ("", "indexer.") for kind in "qk"),
                ),
                LESS_ONE,
            ),
            "mlp.gate_up_proj.weight": JOINED_DENSE,
            "mlp.shared_experts.gate_up_proj.weight": JOINED_SHARED,
        },
        split="minimax-m2",
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
        _QWEN3_SIZES,
        fixed={"norm_topk_prob": True},  # llama.cpp assumes this without an entry
    ),
    "qwen3vlmoe": GgufFamily(
        "qwen3_moe",  # the text part, in which the three position ids of a token are equal
        _QWEN3_SIZES,
        fixed={"norm_topk_prob": True},
        named_as="qwen3moe",
    ),
}
