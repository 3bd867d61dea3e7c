"""The GGUF architectures with linear attention in most layers, and sparse attention chosen by an indexer in the others:
a part of the table in `gguf_families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smoe.errors import UnsupportedModelError
from smoe.models.gguf_arrangements import (
    GROUPED_STATE,
    JOINED_CONVOLUTIONS,
    JOINED_INDEXER,
    KEYS_AND_VALUES,
    LESS_ONE,
    LOGARITHM,
)
from smoe.models.gguf_attention_families import SIGMOID
from smoe.models.gguf_family import Arrangement, Entries, GgufFamily, dense_first
from smoe.models.gguf_latent_families import DEEPSEEK_SIZES, INDEXER_SIZES, ROUTED_IN_GROUPS, latent_attention
from smoe.models.gguf_state_families import QWEN_NORMS, QWEN_STATE, QWEN_STATE_NAMES, qwen35

if TYPE_CHECKING:
    import torch

_TABLE = "per_layer_token_embd.weight"
_TABLE_MULTIPLE = 128
"""The number of which the table's number of rows is a multiple in transformers' default configuration."""


def _qwen4(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields of the linear attention, the indexer's pooling and the n-gram table."""
    qwen35(entries, fields)
    fields["indexer_compress_ratio"] = max(entries.numbers("attention.compress_ratios", fields["num_hidden_layers"]))
    layers = entries.values.get("ple.layers") or []
    if len(layers) > 1:
        raise UnsupportedModelError(f"{entries.path} has n-gram tables in {len(layers)} layers; smoe reads one table")
    if layers:
        _ngrams(entries, fields, layers[0])


def _ngrams(entries: Entries, fields: dict[str, Any], layer: int) -> None:
    """Add the configuration fields of the n-gram table of `layer`. The numbers of its hash function are metadata in the
    file, and buffers in transformers."""
    size, each = entries.number("ple.ngram_size"), entries.number("ple.heads_per_ngram")
    heads = (size - 1) * each
    sizes = entries.numbers("ple.head_vocab_sizes", heads)
    padded = -(-sum(sizes) // _TABLE_MULTIPLE) * _TABLE_MULTIPLE
    rows = entries.tensors[_TABLE].shape[0]
    fields |= {
        "ple_layer_ids": [layer + 1],
        "ngram_size": size,
        "heads_per_ngram": each,
        "ple_conv_kernel_size": entries.number("ple.conv_kernel"),
        "ple_embed_dim": heads * entries.number("embedding_length_per_layer_input"),
        "ngram_vocab_size_base": sizes[0],
        "make_ngram_vocab_size_divisible_by": _TABLE_MULTIPLE if padded == rows else rows,
        "ngram_hash": {
            "layer_multipliers": entries.numbers("ple.layer_multipliers", size),
            "ngram_heads_vocab_sizes": sizes,
            "ngram_heads_offsets": entries.numbers("ple.head_offsets", heads),
        },
    }
    end = entries.number("ple.eos_token_id")  # transformers' hash function uses the first end token
    ends = fields["eos_token_id"] if isinstance(fields["eos_token_id"], list) else [fields["eos_token_id"]]
    fields["eos_token_id"] = [end, *(token for token in ends if token not in (end, None))]


def _hash_numbers(name: str) -> Arrangement:
    """Return the conversion that takes a buffer of the n-gram table from the configuration (`_ngrams`)."""

    def whole(parts: Any, config: Any) -> torch.Tensor:
        import torch

        return torch.tensor(config.ngram_hash[name])

    return Arrangement(whole, is_computed=True)


_MIXERS = {
    f"{place}hc_norm.weight": f"{prefix}_norm.weight"
    for place, prefix in (
        ("attn_hyper_connection.", "hc_attn"),
        ("mlp_hyper_connection.", "hc_ffn"),
        ("model.hyper_connection_mixer.", "output_hc"),
    )
}
"""{transformers' name of the norm of a mixer of residual streams: name of the tensor}."""
_MIXER_PARTS = {"input_mix_weight_down": "down", "input_mix_weight_up": "up", "block_inject_weight": "inject"}
_QWEN4_NORMS = (
    *_MIXERS,
    *(f"self_attn.indexer.{kind}_layernorm.weight" for kind in "qk"),
    *(f"ple.norm_{kind}.weight" for kind in ("key", "query", "conv")),
)


def _glm5(entries: Entries, fields: dict[str, Any]) -> None:
    """Add the configuration fields for the kinds of layers, the indexer's pools and the limit of activations."""
    latent_attention(entries, fields)
    count = fields["num_hidden_layers"]
    has_keys = entries.numbers("attention.head_count_kv", count)
    fields["layer_types"] = ["full_attention" if each else "linear_attention" for each in has_keys]
    fields["mlp_layer_types"] = dense_first(fields.pop("first_k_dense_replace"), count)
    has_indexer = entries.numbers("attention.indexer.types", count, 1)
    fields["indexer_types"] = ["full" if each else "shared" for each in has_indexer]
    fields["index_kpool_always_select_tail"] = bool(entries.values.get("attention.indexer.kpool_select_tail", True))
    fields["linear_num_heads"] = fields["num_attention_heads"]
    fields["linear_lower_bound"] = entries.values.get("kda.gate_lower_bound")
    limits = {kind: set(entries.numbers(f"swiglu_clamp_{kind}", count, 0.0)) for kind in ("exp", "shexp")}
    if limits["exp"] != limits["shexp"] or len(limits["exp"]) != 1 or 0.0 in limits["exp"]:
        raise UnsupportedModelError(
            f"{entries.path} limits activations of routed experts to {sorted(limits['exp'])} and those of shared "
            f"experts to {sorted(limits['shexp'])}; transformers' 'glm5_next' has one limit for all"
        )
    fields["swiglu_limit"] = limits["exp"].pop()
    del fields["rope_parameters"]  # this model has no rotary embeddings


FAMILIES: Mapping[str, GgufFamily] = {
    "glm5-next": GgufFamily(
        "glm5_next_text",
        {
            **DEEPSEEK_SIZES,
            **INDEXER_SIZES,
            "attention.indexer.kpool": "index_kpool",
            "expert_weights_norm": "norm_topk_prob",
            "hyper_connection.count": "hc_mult",
            "hyper_connection.epsilon": "hc_eps",
            "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
            "kda.head_dim": "linear_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
        },
        fixed={**ROUTED_IN_GROUPS, "norm_topk_prob": True, "qk_rope_head_dim": 0},
        allowed={"expert_gating_func": SIGMOID},
        read=frozenset({"attention.head_count_kv"}),
        complete=_glm5,
        named_as="glm-dsa",
        names={
            **{f"self_attn.{kind}_proj.weight": f"attn_{kind}.weight" for kind in "qkv"},
            "self_attn.forget_gate.A_log": "ssm_a",
            "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
            **{f"self_attn.forget_gate.f_{part}_proj.weight": f"ssm_f_{part}.weight" for part in "ab"},
            **{f"self_attn.g_{part}_proj.weight": f"ssm_g_{part}.weight" for part in "ab"},
            "self_attn.b_proj.weight": "ssm_beta.weight",
            "self_attn.o_norm.weight": "ssm_norm.weight",
            "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
            "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
            **{
                f"{part}_hc.{kind}": f"hc_{part}_{kind}.weight"
                for part in ("attn", "ffn")
                for kind in ("fn", "base", "scale")
            },
        },
        arrangements={
            **KEYS_AND_VALUES,
            "self_attn.forget_gate.A_log": LOGARITHM,
            "self_attn.conv1d.weight": JOINED_CONVOLUTIONS,
        },
        split="glm4",
    ),
    "qwen4exp": GgufFamily(
        "qwen4_exp_text",
        {
            **QWEN_STATE,
            "attention.indexer.head_count": "indexer_n_heads",
            "attention.indexer.key_length": "indexer_head_dim",
            "attention.indexer.top_k": "indexer_budget",
            "hyper_connection.count": "hc_count",
            "hyper_connection.low_rank": "hc_lowrank",
        },
        fixed={"indexer_kv_heads": 1, "output_gate_type": "sigmoid"},
        complete=_qwen4,
        has_partial_rotary=True,
        named_as="qwen35moe",
        names={
            **QWEN_STATE_NAMES,
            **_MIXERS,
            **{
                norm.replace("hc_norm", part): key.replace("_norm", f"_{name}")
                for norm, key in _MIXERS.items()
                for part, name in _MIXER_PARTS.items()
            },
            **{f"self_attn.indexer.{kind}_layernorm.weight": f"indexer.{kind}_norm.weight" for kind in "qk"},
            **{f"ple.{kind}_proj.weight": f"ple_{kind}.weight" for kind in ("key", "value")},
            **{f"ple.norm_{kind}.weight": f"ple_norm_{kind}.weight" for kind in ("key", "query", "conv")},
            "ple.conv1d.weight": "ple_conv1d.weight",
        },
        shared_names={"ple.ple_embedding.ngram_embedding.weight": _TABLE},
        arrangements={
            **QWEN_NORMS,
            **GROUPED_STATE,
            **dict.fromkeys(_QWEN4_NORMS, LESS_ONE),
            "self_attn.indexer.index_qk_proj.weight": JOINED_INDEXER,
            **{
                f"ple.ple_embedding.{name}": _hash_numbers(name)
                for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
            },
        },
        split="qwen35",
    ),
}
