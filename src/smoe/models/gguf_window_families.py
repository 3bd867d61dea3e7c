"""The GGUF architectures whose files say which layers attend only to the last tokens (a sliding window): a part of the
table in `gguf_families.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smoe.errors import UnsupportedModelError
from smoe.models.gguf_arrangements import PAIRED_ROWS, SPLIT_ATTENTION
from smoe.models.gguf_attention_families import GRANITE_NAMES, GRANITE_SIZES, ROUTED, SIGMOID
from smoe.models.gguf_family import Entries, GgufFamily, dense_first

_PATTERN = "attention.sliding_window_pattern"


def sliding_layers(entries: Entries, count: int, usual: Sequence[bool] = ()) -> list[bool]:
    """Return, for each of `count` layers, whether it has a sliding window.

    A metadata entry that is a single number is a period: the last layer of each period attends to all tokens, and the
    other layers have a window. `usual`: the pattern, repeated over the layers, for files without an entry.
    """
    pattern = entries.values.get(_PATTERN)
    if isinstance(pattern, list) or (pattern is None and not usual):
        return [bool(each) for each in entries.numbers(_PATTERN, count)]
    if pattern is not None:
        period = entries.number(_PATTERN)
        return [layer % period < period - 1 for layer in range(count)]
    return [usual[layer % len(usual)] for layer in range(count)]


def layer_types(is_sliding: Sequence[bool]) -> list[str]:
    """Return transformers' name of the kind of attention of each layer."""
    return ["sliding_attention" if each else "full_attention" for each in is_sliding]


def _rope_by_layer_type(entries: Entries, fields: dict[str, Any]) -> None:
    """Give layers with a sliding window their own rotary embedding in the configuration: another base, another rotated
    fraction of a head, and no scaling."""
    rope, head = fields["rope_parameters"], fields["head_dim"]
    turned = entries.number("rope.dimension_count", head)
    near = {
        "rope_type": "default",
        "rope_theta": entries.number("rope.freq_base_swa", rope["rope_theta"]),
        "partial_rotary_factor": entries.number("rope.dimension_count_swa", turned) / head,
    }
    rope["partial_rotary_factor"] = turned / head
    fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": near}


def _cohere(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for layer types and the router's scores. If the scores are a softmax, transformers
    always normalises the chosen weights."""
    count = fields["num_hidden_layers"]
    fields["layer_types"] = layer_types(sliding_layers(entries, count, (True, True, True, False)))
    fields["mlp_layer_types"] = dense_first(entries.number("leading_dense_block_count", 0), count)
    takes_softmax = entries.number("expert_gating_func", 2) == 1
    fields["expert_selection_fn"] = "softmax" if takes_softmax else "sigmoid"
    if takes_softmax and not fields["norm_topk_prob"]:
        raise UnsupportedModelError(
            f"{entries.path}: 'cohere2moe.expert_weights_norm' is false with a softmax router; transformers' "
            "'cohere2_moe' normalises the weights of such a router"
        )


def _exaone(entries: Entries, fields: dict[str, Any]) -> None:
    count = fields["num_hidden_layers"]
    fields["layer_types"] = layer_types(sliding_layers(entries, count))
    fields["mlp_layer_types"] = dense_first(fields["first_k_dense_replace"], count)


def _gemma4(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for layer types and head sizes. Layers with global attention have other heads than
    layers with a window, and may use their keys as values."""
    count = fields["num_hidden_layers"]
    is_sliding = sliding_layers(entries, count)
    heads = entries.numbers("attention.head_count_kv", count)
    fields["layer_types"] = layer_types(is_sliding)
    fields["num_key_value_heads"] = next((n for n, each in zip(heads, is_sliding, strict=True) if each), heads[0])
    fields["per_layer_config"] = {
        str(layer): {"head_dim": entries.number("attention.key_length")}
        | ({"num_key_value_heads": heads[layer]} if heads[layer] != fields["num_key_value_heads"] else {})
        for layer in range(count)
        if not is_sliding[layer]
    }
    fields["attention_k_eq_v"] = any(
        f"blk.{layer}.attn_v.weight" not in entries.tensors for layer in fields["per_layer_config"]
    )
    theta, near_theta = fields["rope_parameters"]["rope_theta"], entries.number("rope.freq_base_swa", 10_000.0)
    fields["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": near_theta},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": theta},
    }
    fields["vocab_size_per_layer_input"] = fields["vocab_size"]


def _gemma4_frequencies(config: Any) -> list[float]:
    """Return the factors by which Gemma 4 files divide rotary frequencies: 1 for rotated dimensions, a huge number for
    others."""
    half = config.per_layer_config["full_attention"].head_dim // 2
    turned = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return [1.0] * turned + [1e30] * (half - turned)


def _granite_swa(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for layer types and the rotary base of each layer; 0 stands for a layer without
    rotary embeddings."""
    count, theta = fields["num_hidden_layers"], fields["rope_parameters"]["rope_theta"]
    fields["layer_types"] = layer_types(sliding_layers(entries, count))
    turns = entries.numbers("attention.rope_pattern", count, 1)
    fields["layer_rope_theta"] = [theta if each else 0.0 for each in turns]


def _laguna(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for layer types, heads and the width of the attention's gate. Files do not say which
    layers have a window: every fourth layer, beginning with the first, has none."""
    count, head = fields["num_hidden_layers"], fields["head_dim"]
    has_window = bool(fields["sliding_window"])
    fields["layer_types"] = layer_types(sliding_layers(entries, count, (False, *[has_window] * 3)))
    fields["mlp_layer_types"] = dense_first(entries.number("leading_dense_block_count", 0), count)
    heads = entries.numbers("attention.head_count", count)
    fields["num_attention_heads"], fields["num_attention_heads_per_layer"] = heads[0], heads
    gate = entries.tensors.get("blk.0.attn_gate.weight")
    fields["gating"] = "per-element" if gate is not None and gate.shape[0] == heads[0] * head else "per-head"
    _rope_by_layer_type(entries, fields)


def _mellum(entries: Entries, fields: dict[str, Any]) -> None:
    count, has_window = fields["num_hidden_layers"], bool(fields["sliding_window"])
    usual = (True, True, True, False) if has_window else (False,)
    fields["layer_types"] = layer_types(sliding_layers(entries, count, usual))
    _rope_by_layer_type(entries, fields)


def _mimo(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for layer types and heads. In transformers, a window includes the token itself, and
    layers with a window have twice as many key-value heads as other layers."""
    count = fields["num_hidden_layers"]
    is_sliding = sliding_layers(entries, count)
    fields["layer_types"] = layer_types(is_sliding)
    fields["mlp_layer_types"] = [
        "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in entries.tensors else "dense" for layer in range(count)
    ]
    fields["sliding_window"] = entries.number("attention.sliding_window") + 1
    heads = entries.numbers("attention.head_count_kv", count)
    whole = {n // 2 if each else n for n, each in zip(heads, is_sliding, strict=True)}
    if len(whole) > 1 or any(n % 2 for n, each in zip(heads, is_sliding, strict=True) if each):
        raise UnsupportedModelError(
            f"{entries.path} has {heads} key-value heads ('mimo2.attention.head_count_kv'); transformers' "
            "'mimo_v2_flash' has twice as many in layers with a window as in the others"
        )
    (fields["num_key_value_heads"],) = whole
    _rope_by_layer_type(entries, fields)


_SINKS = {"self_attn.sinks": "attn_sinks.weight"}

FAMILIES: Mapping[str, GgufFamily] = {
    "cohere2moe": GgufFamily(
        "cohere2_moe",
        {
            "attention.key_length": "head_dim",
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": "num_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "feed_forward_length": "prefix_dense_intermediate_size",
            "logit_scale": "logit_scale",
        },
        fixed={"norm_topk_prob": False, "num_shared_experts": 0, "rms_norm_eps": None},
        read=frozenset({"expert_gating_func", "leading_dense_block_count"}),
        complete=_cohere,
        named_as="dots1",
        split=None,
    ),
    "exaone-moe": GgufFamily(
        "exaone_moe",
        {
            **ROUTED,
            "attention.key_length": "head_dim",
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_experts",
            "expert_shared_count": "num_shared_experts",
        },
        fixed={"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        allowed={"expert_gating_func": SIGMOID},
        complete=_exaone,
        split="exaone-moe",
    ),
    "gemma4": GgufFamily(
        "gemma4_text",
        {
            "attention.key_length_swa": "head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.sliding_window": "sliding_window",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_used_count": "top_k_experts",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        fixed={"enable_moe_block": True, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        read=frozenset({"attention.head_count_kv", "rope.dimension_count"}),
        complete=_gemma4,
        names={
            "layer_scalar": "layer_output_scale.weight",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
        },
        implied={"rope_freqs.weight": _gemma4_frequencies},
        split=None,
    ),
    "granite_swa": GgufFamily(
        "granitemoe_swa",
        {
            **GRANITE_SIZES,
            "attention.sliding_window": "sliding_window",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        fixed={"shared_intermediate_size": 0},
        complete=_granite_swa,
        named_as="granitemoe",
        names={
            **GRANITE_NAMES,
            **_SINKS,
            "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
            "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
        },
        arrangements=PAIRED_ROWS,
        split=None,
    ),
    "laguna": GgufFamily(
        "laguna",
        {
            "attention.key_length": "head_dim",
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_scale": "moe_routed_scaling_factor",
        },
        fixed={"sliding_window": 0},
        allowed={"expert_gating_func": SIGMOID, "expert_weights_norm": (True,)},
        read=frozenset({"attention.head_count", "leading_dense_block_count", "rope.dimension_count"}),
        complete=_laguna,
        named_as="dots1",
        names={"self_attn.g_proj.weight": "attn_gate.weight"},
        split=None,
    ),
    "mellum": GgufFamily(
        "mellum",
        {
            "attention.key_length": "head_dim",
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fixed={"norm_topk_prob": True, "sliding_window": None},
        read=frozenset({"rope.dimension_count"}),
        complete=_mellum,
        named_as="qwen3moe",
        split=None,
    ),
    "mimo2": GgufFamily(
        "mimo_v2_flash",
        {
            "attention.key_length": "head_dim",
            "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale",
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        fixed={"attention_value_scale": None, "n_group": 1, "topk_group": 1},
        allowed={"expert_gating_func": SIGMOID},
        read=frozenset({"attention.head_count_kv", "attention.sliding_window", "rope.dimension_count"}),
        complete=_mimo,
        named_as="dots1",
        names=_SINKS,
        arrangements=SPLIT_ATTENTION,
        split=None,
    ),
}
