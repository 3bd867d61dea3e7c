"""Architectures of GGUF files with multi-head latent attention (`gguf_families.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smoe.models.gguf_arrangements import KEYS_AND_VALUES
from smoe.models.gguf_attention_families import SIGMOID
from smoe.models.gguf_family import NEXT_TOKEN_LAYERS, Entries, GgufFamily


def _latent_attention(entries: Entries, fields: dict[str, Any]) -> None:
    """Sizes of multi-head latent attention. Files have it as one head of keys and values, early ones as all heads."""
    keys = entries.number("attention.key_length_mla", entries.values.get("attention.key_length"))
    values = entries.number("attention.value_length_mla", entries.values.get("attention.value_length"))
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields["qk_nope_head_dim"], fields["v_head_dim"] = keys - fields["qk_rope_head_dim"], values
    fields.setdefault("q_lora_rank", None)
    rope = fields["rope_parameters"]
    scale = entries.number("rope.scaling.yarn_log_multiplier", 0.0) * 10
    if rope["rope_type"] == "yarn" and scale:
        rope |= {"mscale": scale, "mscale_all_dim": scale}


def _deepseek_v2(entries: Entries, fields: dict[str, Any]) -> None:
    _latent_attention(entries, fields)
    has_groups = (fields.get("n_group") or 1) > 1
    fields["topk_method"] = "group_limited_greedy" if has_groups else "greedy"


_DEEPSEEK_SIZES = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "rope.dimension_count": "qk_rope_head_dim",
}
_DEEPSEEK_V2 = GgufFamily(
    "deepseek_v2",
    _DEEPSEEK_SIZES,
    fixed={"first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    allowed={"expert_weights_norm": (False,)},
    read=frozenset({"attention.head_count_kv", "rope.scaling.yarn_log_multiplier"}),
    complete=_deepseek_v2,
    arrangements=KEYS_AND_VALUES,
)


def _deepseek_v2_by_scores(entries: Entries) -> GgufFamily | None:
    """V2's routers take softmax, and have no correction; early files say nothing of it, those of V3 neither."""
    usual = 2 if any(".exp_probs_b." in key for key in entries.tensors) else 1
    return _DEEPSEEK_V2 if entries.number("expert_gating_func", usual) in (0, 1) else None


_DEEPSEEK_V3 = GgufFamily(
    "deepseek_v3",
    {**_DEEPSEEK_SIZES, "expert_weights_norm": "norm_topk_prob", "nextn_predict_layers": NEXT_TOKEN_LAYERS},
    fixed={
        "first_k_dense_replace": 0,
        "n_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        NEXT_TOKEN_LAYERS: 0,
    },
    allowed={"expert_gating_func": SIGMOID},
    read=frozenset({"attention.head_count_kv", "rope.scaling.yarn_log_multiplier"}),
    complete=_latent_attention,
    arrangements=KEYS_AND_VALUES,
    variant=_deepseek_v2_by_scores,
    split="deepseek-v3",
)

FAMILIES: Mapping[str, GgufFamily] = {"deepseek2": _DEEPSEEK_V3}
