"""What the GGUF files of each architecture say in their own way: how sizes are named, what goes without saying, and
which rows lie in another order than the library's.

Adding a family is one entry here, and a toy of it in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.gguf_header import GgufHeader
from smoe.models.gguf_arrangements import (
    GROUPED,
    GROUPED_BEHIND_KEYS,
    GROUPED_COLUMNS,
    GROUPED_LOGARITHM,
    KEYS_AND_VALUES,
    LESS_ONE,
    LOGARITHM,
    PAIRED_ROWS,
    QUERY_KEY_VALUE_GATE,
)
from smoe.models.gguf_family import NEXT_TOKEN_LAYERS, Entries, GgufFamily

_SIGMOID = (0, 2)
"""How a router's scores are made: by a sigmoid, also where a file does not say it."""


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
    split="deepseek-llm",
)
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
    allowed={"expert_gating_func": _SIGMOID},
    read=frozenset({"attention.head_count_kv", "rope.scaling.yarn_log_multiplier"}),
    complete=_latent_attention,
    arrangements=KEYS_AND_VALUES,
    split="deepseek-v3",
)


def _linear_attention(entries: Entries, fields: dict[str, Any]) -> None:
    """Which layers have a state in the place of attention, and the state's sizes."""
    fields["linear_value_head_dim"] = entries.number("ssm.inner_size") // fields["linear_num_value_heads"]
    interval, count = entries.number("full_attention_interval", 4), fields["num_hidden_layers"]
    usual = [bool((layer + 1) % interval) for layer in range(count)]
    has_state = entries.values.get("attention.recurrent_layers", usual)[:count]
    fields["layer_types"] = ["linear_attention" if each else "full_attention" for each in has_state]


_QWEN_STATE = {
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_QWEN_NORMS = dict.fromkeys(
    (
        "model.norm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    ),
    LESS_ONE,
)
_QWEN_STATE_NAMES = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}


def _qwen35(entries: Entries, fields: dict[str, Any]) -> None:
    _linear_attention(entries, fields)
    sections = entries.values.get("rope.dimension_sections")
    if sections:
        fields["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}


FAMILIES: Mapping[str, GgufFamily] = {
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
        allowed={"expert_gating_func": _SIGMOID},
        from_tensors={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
        has_partial_rotary=True,
        split="glm4",
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
        allowed={"expert_gating_func": _SIGMOID},
        has_partial_rotary=True,
        split="minimax-m2",
    ),
    "olmoe": GgufFamily(
        "olmoe",
        {"expert_count": "num_experts", "expert_feed_forward_length": "intermediate_size"},
        split="olmo",
    ),
    "deepseek2": _DEEPSEEK_V3,
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
    "qwen3next": GgufFamily(
        "qwen3_next",
        _QWEN_STATE,
        complete=_linear_attention,
        has_partial_rotary=True,
        names=_QWEN_STATE_NAMES,
        arrangements={
            **_QWEN_NORMS,
            "linear_attn.A_log": LOGARITHM,
            "linear_attn.in_proj_qkvz.weight": QUERY_KEY_VALUE_GATE,
        },
    ),
    "qwen35moe": GgufFamily(
        "qwen3_5_moe_text",
        _QWEN_STATE,
        complete=_qwen35,
        has_partial_rotary=True,
        names=_QWEN_STATE_NAMES,
        arrangements={
            **_QWEN_NORMS,
            "linear_attn.A_log": GROUPED_LOGARITHM,
            "linear_attn.conv1d.weight": GROUPED_BEHIND_KEYS,
            "linear_attn.dt_bias": GROUPED,
            "linear_attn.in_proj_a.weight": GROUPED,
            "linear_attn.in_proj_b.weight": GROUPED,
            "linear_attn.in_proj_qkv.weight": GROUPED_BEHIND_KEYS,
            "linear_attn.in_proj_z.weight": GROUPED,
            "linear_attn.out_proj.weight": GROUPED_COLUMNS,
        },
        split="qwen35",
    ),
}
"""By the architecture's name in the file."""


def architecture_of(header: GgufHeader) -> str:
    """The name that a file has for its family; raises `UnsupportedModelError` for one that smoe does not read."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{header.path} does not say which architecture it is for; download it again")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{header.path} holds a model of the architecture {name!r:.80}; of GGUF files smoe reads "
            f"{', '.join(FAMILIES)}: take the model's safetensors release, which may well work"
        )
    return name


def family_of(entries: Entries) -> GgufFamily:
    """The family of the library that computes what a file holds."""
    if entries.architecture == "deepseek2" and _is_deepseek_v2(entries):
        return _DEEPSEEK_V2
    return FAMILIES[entries.architecture]


def _is_deepseek_v2(entries: Entries) -> bool:
    """V2's routers take softmax, and have no correction; early files say nothing of it, those of V3 neither."""
    usual = 2 if any(".exp_probs_b." in key for key in entries.tensors) else 1
    return entries.number("expert_gating_func", usual) in (0, 1)
