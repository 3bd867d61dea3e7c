"""The GGUF architectures with multi-head latent attention: a part of the table in `gguf_families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smoe.errors import UnsupportedModelError
from smoe.models.gguf_arrangements import KEYS_AND_VALUES, PAIRED_LATENT_ROWS, UNSCALED_LATENT_NORMS
from smoe.models.gguf_attention_families import SIGMOID
from smoe.models.gguf_family import NEXT_TOKEN_LAYERS, Entries, GgufFamily, dense_first
from smoe.models.gguf_window_families import sliding_layers


def latent_attention(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for the sizes of multi-head latent attention. Newer files describe one key-value
    head for all queries, early files all heads."""
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
    latent_attention(entries, fields)
    has_groups = (fields.get("n_group") or 1) > 1
    fields["topk_method"] = "group_limited_greedy" if has_groups else "greedy"


ROUTED_IN_GROUPS = {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}
"""Default values for the fields of DeepSeek's router, if a file has no entries for them."""
DEEPSEEK_SIZES = {
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
    DEEPSEEK_SIZES,
    fixed={"first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
    allowed={"expert_weights_norm": (False,)},
    read=frozenset({"attention.head_count_kv", "rope.scaling.yarn_log_multiplier"}),
    complete=_deepseek_v2,
    arrangements=KEYS_AND_VALUES,
)


def _deepseek_v2_by_scores(entries: Entries) -> GgufFamily | None:
    """Return DeepSeek-V2's description if the file is for V2, else None.

    V2's router uses softmax without a score correction, V3's uses sigmoid; early files do not say which.
    """
    usual = 2 if any(".exp_probs_b." in key for key in entries.tensors) else 1
    return _DEEPSEEK_V2 if entries.number("expert_gating_func", usual) in (0, 1) else None


_DEEPSEEK_V3 = GgufFamily(
    "deepseek_v3",
    {**DEEPSEEK_SIZES, "expert_weights_norm": "norm_topk_prob", "nextn_predict_layers": NEXT_TOKEN_LAYERS},
    fixed={**ROUTED_IN_GROUPS, NEXT_TOKEN_LAYERS: 0},
    allowed={"expert_gating_func": SIGMOID},
    read=frozenset({"attention.head_count_kv", "rope.scaling.yarn_log_multiplier"}),
    complete=latent_attention,
    arrangements=KEYS_AND_VALUES,
    variant=_deepseek_v2_by_scores,
    split="deepseek-v3",
)


def _deepseek_v4(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for each layer's key compression, the number of hash-routed layers, and the rotary
    embeddings."""
    count = fields["num_hidden_layers"]
    fields["compress_ratios"] = entries.numbers("attention.compress_ratios", count)
    fields["num_hash_layers"] = entries.number("hash_layer_count", 0)
    fields["swiglu_limit"] = entries.number("swiglu_clamp_exp")
    rope = fields["rope_parameters"]
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["partial_rotary_factor"] = entries.number("rope.dimension_count") / fields["head_dim"]


def _indexed(entries: Entries, fields: dict[str, Any]) -> None:
    """Add a configuration field with the layers that have an indexer of their own. The other layers use an earlier
    layer's selection of positions."""
    latent_attention(entries, fields)
    count, dense = fields["num_hidden_layers"], fields["first_k_dense_replace"]
    has_indexer = [f"blk.{layer}.indexer.attn_k.weight" in entries.tensors for layer in range(count)]
    fields["indexer_types"] = ["full" if each else "shared" for each in has_indexer]
    fields["mlp_layer_types"] = dense_first(dense, count)


INDEXER_SIZES = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_INDEXED = GgufFamily(
    "glm_moe_dsa",
    {**_DEEPSEEK_V3.sizes, **INDEXER_SIZES},
    fixed=_DEEPSEEK_V3.fixed,
    allowed={"expert_gating_func": SIGMOID},
    read=frozenset({"attention.head_count_kv", "rope.scaling.yarn_log_multiplier"}),
    complete=_indexed,
    arrangements=KEYS_AND_VALUES,
    split="glm4",
)


def _hy_v4(entries: Entries, fields: dict[str, Any]) -> None:
    """Add configuration fields: the layers that have experts, the layers that have an indexer of their own, and the
    limit of the experts' activation."""
    latent_attention(entries, fields)
    count = fields["num_hidden_layers"]
    fields["mlp_layer_types"] = dense_first(fields.pop("first_k_dense_replace"), count)
    has_indexer = entries.numbers("attention.indexer.types", count)
    fields["indexer_types"] = ["full" if each else "shared" for each in has_indexer]
    fields["swiglu_limit"] = entries.number("swiglu_clamp_exp", 0.0)


def _dots3(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for the two kinds of layers. Layers with a sliding window have another number of
    heads, another size of the latent, and no indexer."""
    count = fields["num_hidden_layers"]
    is_sliding, heads = sliding_layers(entries, count), entries.numbers("attention.head_count", count)
    if entries.values.get("attention.indexer.types", [])[:count] != [not each for each in is_sliding]:
        raise UnsupportedModelError(
            f"{entries.path}: 'dots3note.attention.indexer.types' does not fit transformers' 'dots3_note_text', in "
            "which exactly the layers without a window have an indexer"
        )
    fields["num_attention_heads"] = heads[is_sliding.index(False)] if False in is_sliding else heads[0]
    latent_attention(entries, fields)
    turned, keys = fields["qk_rope_head_dim"], entries.number("attention.key_length_mla_swa")
    fields["head_dim"] = fields["qk_nope_head_dim"] + turned
    fields["layer_types"] = ["sliding_attention" if each else "indexed_attention" for each in is_sliding]
    fields["mlp_layer_types"] = dense_first(fields.pop("first_k_dense_replace"), count)
    fields["shared_experts_intermediate_size"] = fields["moe_intermediate_size"]
    near = {
        "head_dim": keys,
        "kv_lora_rank": entries.number("attention.kv_lora_rank_swa"),
        "qk_nope_head_dim": keys - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": entries.number("attention.value_length_mla_swa"),
    }
    fields["per_layer_config"] = {
        str(layer): {**near, "num_attention_heads": heads[layer], "num_key_value_heads": heads[layer]}
        for layer, each in enumerate(is_sliding)
        if each
    }
    rope = fields["rope_parameters"]
    near_rope = {"rope_type": "default", "rope_theta": entries.number("rope.freq_base_swa", rope["rope_theta"])}
    fields["rope_parameters"] = {"indexed_attention": rope, "sliding_attention": near_rope}


def _mistral4(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration field with the factor by which queries grow beyond the training length; most files leave it
    out."""
    latent_attention(entries, fields)
    fields["rope_parameters"]["llama_4_scaling_beta"] = entries.number("attention.temperature_scale", 0.1)


_HYPER = {
    f"{part}_hc.{kind}": f"hc_{part}_{kind}.weight" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")
}
_HYPER_HEAD = {f"model.hc_head.hc_{kind}": f"output_hc_{kind}.weight" for kind in ("fn", "base", "scale")}
_COMPRESSOR = {
    f"self_attn.compressor.{part}{theirs}": f"{prefix}_compressor_{name}.weight"
    for part, prefix in (("", "attn"), ("indexer.", "indexer"))
    for theirs, name in (
        ("position_bias", "ape"),
        ("kv_proj.weight", "kv"),
        ("gate_proj.weight", "gate"),
        ("kv_norm.weight", "norm"),
    )
}

FAMILIES: Mapping[str, GgufFamily] = {
    "deepseek2": _DEEPSEEK_V3,
    "deepseek4": GgufFamily(
        "deepseek_v4",
        {
            **INDEXER_SIZES,
            "attention.compress_rope_freq_base": "compress_rope_theta",
            "attention.key_length": "head_dim",
            "attention.output_group_count": "o_groups",
            "attention.output_lora_rank": "o_lora_rank",
            "attention.q_lora_rank": "q_lora_rank",
            "attention.sliding_window": "sliding_window",
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "hyper_connection.count": "hc_mult",
            "hyper_connection.epsilon": "hc_eps",
            "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
        },
        fixed={NEXT_TOKEN_LAYERS: 0},
        allowed={"expert_gating_func": (4,)},
        read=frozenset({"feed_forward_length", "rope.dimension_count"}),
        complete=_deepseek_v4,
        named_as="deepseek2",
        names={
            **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in ("q_a", "q_b")},
            "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
            "self_attn.kv_proj.weight": "attn_kv.weight",
            "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
            "self_attn.o_a_proj.weight": "attn_output_a.weight",
            "self_attn.o_b_proj.weight": "attn_output_b.weight",
            "self_attn.sinks": "attn_sinks.weight",
            **_COMPRESSOR,
            "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
            "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
            "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
            **_HYPER,
            **_HYPER_HEAD,
        },
        unread=r"exp_probs_b_vl\.bias$",
        split="deepseek-v3",
    ),
    "dots3note": GgufFamily(
        "dots3_note_text",
        {
            **DEEPSEEK_SIZES,
            **INDEXER_SIZES,
            "attention.sliding_window": "sliding_window",
            "expert_weights_norm": "norm_topk_prob",
        },
        fixed=ROUTED_IN_GROUPS,
        allowed={"expert_gating_func": SIGMOID},
        read=frozenset({"attention.head_count", "attention.head_count_kv", "rope.scaling.yarn_log_multiplier"}),
        complete=_dots3,
        named_as="glm-dsa",
        names={
            "self_attn.g_proj.weight": "attn_gate.weight",
            "self_attn.k_rope_only_layernorm.weight": "attn_k_norm.weight",
        },
        arrangements={**KEYS_AND_VALUES, **UNSCALED_LATENT_NORMS},
        split=None,
    ),
    "hy_v4": GgufFamily(
        "hy_v4",
        {
            **DEEPSEEK_SIZES,
            **INDEXER_SIZES,
            "expert_weights_norm": "norm_topk_prob",
            "hyper_connection.count": "hc_mult",
            "hyper_connection.epsilon": "hc_eps",
            "hyper_connection.magnitude": "hc_magnitude",
        },
        fixed=ROUTED_IN_GROUPS,
        allowed={"expert_gating_func": SIGMOID},
        read=frozenset({"attention.head_count_kv", "rope.scaling.yarn_log_multiplier"}),
        complete=_hy_v4,
        arrangements={**KEYS_AND_VALUES, **PAIRED_LATENT_ROWS},
        named_as="glm-dsa",
        names={
            "self_attn.gate_proj.weight": "attn_gate.weight",
            "self_attn.sinks": "attn_sinks.weight",
            **_HYPER,
            **_HYPER_HEAD,
        },
        split=None,
    ),
    "mistral4": GgufFamily(
        "mistral4",
        {**DEEPSEEK_SIZES, "expert_weights_norm": "norm_topk_prob"},
        fixed=ROUTED_IN_GROUPS,
        read=frozenset({"attention.head_count_kv", "rope.scaling.yarn_log_multiplier"}),
        complete=_mistral4,
        arrangements=KEYS_AND_VALUES,
        split="tekken",
    ),
    "deepseek32": replace(_INDEXED, model_type="deepseek_v32", named_as="glm-dsa", split="deepseek-v3"),
    "glm-dsa": _INDEXED,
}
