"""The GGUF architectures in which some layers have a recurrent state in place of keys and values: a part of the table
in `gguf_families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smoe.errors import UnsupportedModelError
from smoe.models.gguf_arrangements import (
    GROUPED_STATE,
    JOINED_CONVOLUTIONS,
    JOINED_SHARED,
    KEYS_AND_VALUES,
    LESS_ONE,
    LOGARITHM,
    PAIRED_ROWS,
    POSITIVE_LOGARITHM,
    QUERY_KEY_VALUE_GATE,
    RESHAPED,
    STATE_GATE,
    paired_rows,
)
from smoe.models.gguf_attention_families import GRANITE_NAMES, GRANITE_SIZES, SIGMOID
from smoe.models.gguf_family import NEXT_TOKEN_LAYERS, Entries, GgufFamily, dense_first
from smoe.models.gguf_latent_families import DEEPSEEK_SIZES, ROUTED_IN_GROUPS, latent_attention


def _linear_attention(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for the type of each layer and the sizes of the recurrent state."""
    fields["linear_value_head_dim"] = entries.number("ssm.inner_size") // fields["linear_num_value_heads"]
    interval, count = entries.number("full_attention_interval", 4), fields["num_hidden_layers"]
    usual = [bool((layer + 1) % interval) for layer in range(count)]
    has_state = entries.values.get("attention.recurrent_layers", usual)[:count]
    fields["layer_types"] = ["linear_attention" if each else "full_attention" for each in has_state]


QWEN_STATE = {
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
QWEN_NORMS = dict.fromkeys(
    (
        "model.norm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    ),
    LESS_ONE,
)
QWEN_STATE_NAMES = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}


def qwen35(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields of `_linear_attention`, and the sections of rotary embeddings for images."""
    _linear_attention(entries, fields)
    sections = entries.values.get("rope.dimension_sections")
    if sections:
        fields["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}


def _layers_with_heads(entries: Entries, fields: dict[str, Any]) -> list[bool]:
    """Return for each layer whether it has attention, which it has if it has key-value heads. Also add the number of
    key-value heads to the configuration."""
    heads = entries.numbers("attention.head_count_kv", fields["num_hidden_layers"])
    fields["num_key_value_heads"] = max(heads)
    return [count > 0 for count in heads]


def _granite_hybrid(entries: Entries, fields: dict[str, Any]) -> None:
    has_heads = _layers_with_heads(entries, fields)
    fields["layer_types"] = ["full_attention" if each else "linear_attention" for each in has_heads]
    inner = entries.number("ssm.inner_size")
    fields["mamba_expand"] = inner // fields["hidden_size"]
    fields["mamba_d_head"] = inner // fields["mamba_n_heads"]
    turns = entries.values.get("rope.scaling.finetuned", True)
    fields["position_embedding_type"] = "rope" if turns else "nope"
    fields["mamba_conv_bias"] = any(key.endswith(".ssm_conv1d.bias") for key in entries.tensors)


def _lfm2(entries: Entries, fields: dict[str, Any]) -> None:
    has_heads = _layers_with_heads(entries, fields)
    fields["layer_types"] = ["full_attention" if each else "conv" for each in has_heads]
    fields["use_expert_bias"] = any(".exp_probs_b." in key for key in entries.tensors)


def _period(layers: list[bool], component: str, entries: Entries) -> tuple[int, int]:
    """Return (period, offset) of the layers that are marked True. Raise `UnsupportedModelError` if these layers do not
    occur at regular intervals."""
    numbers = [number for number, each in enumerate(layers) if each]
    period = numbers[1] - numbers[0] if len(numbers) > 1 else len(layers)
    if not numbers or any(each != (number % period == numbers[0] % period) for number, each in enumerate(layers)):
        raise UnsupportedModelError(
            f"{entries.path} has {component} in the layers {numbers}; transformers' 'jamba' supports this only at "
            "regular distances"
        )
    return period, numbers[0]


def _jamba(entries: Entries, fields: dict[str, Any]) -> None:
    count = fields["num_hidden_layers"]
    with_experts = [f"blk.{layer}.ffn_gate_inp.weight" in entries.tensors for layer in range(count)]
    fields["attn_layer_period"], fields["attn_layer_offset"] = _period(
        _layers_with_heads(entries, fields), "attention", entries
    )
    fields["expert_layer_period"], fields["expert_layer_offset"] = _period(with_experts, "experts", entries)
    fields["mamba_expand"] = entries.number("ssm.inner_size") // fields["hidden_size"]
    del fields["rope_parameters"]


def _nemotron_h(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration field for the type of each layer: recurrent state, attention, experts or a dense
    network."""
    has_heads = _layers_with_heads(entries, fields)
    widths = entries.numbers("feed_forward_length", fields["num_hidden_layers"])
    fields["layers_block_type"] = [
        "full_attention"
        if heads
        else "moe"
        if f"blk.{layer}.ffn_gate_inp.weight" in entries.tensors
        else "mlp"
        if width
        else "linear_attention"
        for layer, (heads, width) in enumerate(zip(has_heads, widths, strict=True))
    ]
    fields["intermediate_size"] = max(widths)
    fields["mamba_head_dim"] = entries.number("ssm.inner_size") // fields["mamba_num_heads"]
    fields["use_conv_bias"] = any(key.endswith(".ssm_conv1d.bias") for key in entries.tensors)
    del fields["rope_parameters"], fields["num_hidden_layers"]


def _kimi_linear(entries: Entries, fields: dict[str, Any]) -> None:
    latent_attention(entries, fields)
    count, dense = fields["num_hidden_layers"], entries.number("leading_dense_block_count", 0)
    has_keys = entries.numbers("attention.head_count_kv", count)
    fields["layer_types"] = ["full_attention" if each else "linear_attention" for each in has_keys]
    fields["mlp_layer_types"] = dense_first(dense, count)
    fields["linear_num_heads"] = fields["num_attention_heads"]


def _bailing3(entries: Entries, fields: dict[str, Any]) -> None:
    _kimi_linear(entries, fields)
    fields["kda_safe_gate"] = bool(entries.values.get("kda.safe_gate", True))
    count = fields["num_hidden_layers"]
    if any(any(entries.numbers(f"swiglu_clamp_{kind}", count, 0.0)) for kind in ("exp", "shexp")):
        raise UnsupportedModelError(
            f"{entries.path} limits the outputs of its experts' gates ('swiglu_clamp_exp'), which transformers' "
            "'bailing_hybrid' does not"
        )


FAMILIES: Mapping[str, GgufFamily] = {
    "bailingmoe3": GgufFamily(
        "bailing_hybrid",
        {
            **DEEPSEEK_SIZES,
            "expert_count": "num_experts",
            "expert_weights_norm": "norm_topk_prob",
            "kda.gate_lower_bound": "kda_lower_bound",
            "kda.head_dim": "head_dim",
            "nextn_predict_layers": NEXT_TOKEN_LAYERS,
            "ssm.conv_kernel": "short_conv_kernel_size",
        },
        fixed={**ROUTED_IN_GROUPS, NEXT_TOKEN_LAYERS: 0},
        allowed={"expert_gating_func": SIGMOID},
        read=frozenset({"attention.head_count_kv"}),
        complete=_bailing3,
        named_as="kimi-linear",
        names={
            "self_attn.forget_gate.A_log": "ssm_a",
            "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
            "self_attn.forget_gate.f_proj.weight": "ssm_f_a.weight",
            "self_attn.g_proj.weight": "attn_gate.weight",
        },
        arrangements={
            **KEYS_AND_VALUES,
            "self_attn.forget_gate.A_log": POSITIVE_LOGARITHM,
            "self_attn.conv1d.weight": JOINED_CONVOLUTIONS,
            "self_attn.g_proj.weight": STATE_GATE,
        },
        split="bailingmoe2",
    ),
    "granitehybrid": GgufFamily(
        "granitemoehybrid",
        {
            **GRANITE_SIZES,
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.group_count": "mamba_n_groups",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_n_heads",
        },
        read=frozenset({"attention.head_count_kv"}),
        complete=_granite_hybrid,
        names={
            **GRANITE_NAMES,
            "mamba.A_log": "ssm_a",
            "mamba.D": "ssm_d",
            "mamba.dt_bias": "ssm_dt.bias",
        },
        arrangements={
            **PAIRED_ROWS,
            "shared_mlp.input_linear.weight": JOINED_SHARED,
            "mamba.A_log": LOGARITHM,
            "mamba.norm.weight": RESHAPED,
        },
        split="refact",
    ),
    "jamba": GgufFamily(
        "jamba",
        {
            "expert_count": "num_experts",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
        },
        read=frozenset({"attention.head_count_kv", "rope.dimension_count"}),
        complete=_jamba,
        arrangements={"mamba.A_log": LOGARITHM},
        split=None,
    ),
    "kimi-linear": GgufFamily(
        "kimi_linear",
        {
            **DEEPSEEK_SIZES,
            "expert_count": "num_experts",
            "expert_weights_norm": "norm_topk_prob",
            "kda.head_dim": "linear_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
        },
        fixed={"n_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "topk_group": 1},
        allowed={"expert_gating_func": SIGMOID},
        read=frozenset({"attention.head_count_kv", "leading_dense_block_count"}),
        complete=_kimi_linear,
        names={
            "self_attn.forget_gate.A_log": "ssm_a",
            "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
            "self_attn.forget_gate.f_a_proj.weight": "ssm_f_a.weight",
            "self_attn.forget_gate.f_b_proj.weight": "ssm_f_b.weight",
        },
        arrangements={
            **KEYS_AND_VALUES,
            "self_attn.forget_gate.A_log": LOGARITHM,
            "self_attn.conv1d.weight": JOINED_CONVOLUTIONS,
        },
        split="kimi-k2",
    ),
    "lfm2moe": GgufFamily(
        "lfm2_moe",
        {
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
            "shortconv.l_cache": "conv_L_cache",
        },
        fixed={"norm_topk_prob": True, "num_dense_layers": 0},
        allowed={"expert_gating_func": SIGMOID},
        read=frozenset({"attention.head_count_kv"}),
        complete=_lfm2,
        names={"feed_forward.expert_bias": "exp_probs_b.bias", "lm_head.weight": "output.weight"},
        split="lfm2",
    ),
    "nemotron_h_moe": GgufFamily(
        "nemotron_h",
        {
            "attention.key_length": "head_dim",
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_shared_count": "n_shared_experts",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "moe_latent_size": "moe_latent_size",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.group_count": "n_groups",
            "ssm.state_size": "ssm_state_size",
            "ssm.time_step_rank": "mamba_num_heads",
        },
        fixed={"norm_topk_prob": False},
        allowed={"expert_gating_func": SIGMOID},
        read=frozenset({"attention.head_count_kv", "feed_forward_length", "rope.dimension_count"}),
        complete=_nemotron_h,
        names={
            "norm.weight": "attn_norm.weight",
            **{f"mixer.{kind}_proj.weight": f"attn_{kind}.weight" for kind in "qkv"},
            "mixer.o_proj.weight": "attn_output.weight",
            "mixer.A_log": "ssm_a",
            "mixer.D": "ssm_d",
            "mixer.dt_bias": "ssm_dt.bias",
            "mixer.conv1d.bias": "ssm_conv1d.bias",
            "mixer.conv1d.weight": "ssm_conv1d.weight",
            "mixer.in_proj.weight": "ssm_in.weight",
            "mixer.norm.weight": "ssm_norm.weight",
            "mixer.out_proj.weight": "ssm_out.weight",
            "mixer.gate.weight": "ffn_gate_inp.weight",
            "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
            "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
            **{f"mixer.{kind}_proj.weight": f"ffn_{kind}.weight" for kind in ("up", "down")},
            **{f"mixer.shared_experts.{kind}_proj.weight": f"ffn_{kind}_shexp.weight" for kind in ("up", "down")},
        },
        arrangements={**paired_rows("mixer"), "mixer.A_log": LOGARITHM, "mixer.norm.weight": RESHAPED},
        split="tekken",
    ),
    "qwen3next": GgufFamily(
        "qwen3_next",
        QWEN_STATE,
        complete=_linear_attention,
        has_partial_rotary=True,
        names=QWEN_STATE_NAMES,
        arrangements={
            **QWEN_NORMS,
            "linear_attn.A_log": LOGARITHM,
            "linear_attn.in_proj_qkvz.weight": QUERY_KEY_VALUE_GATE,
        },
    ),
    "qwen35moe": GgufFamily(
        "qwen3_5_moe_text",
        QWEN_STATE,
        complete=qwen35,
        has_partial_rotary=True,
        names=QWEN_STATE_NAMES,
        arrangements={**QWEN_NORMS, **GROUPED_STATE},
        split="qwen35",
    ),
}
