"""Toys of architectures with linear attention and sparse attention, as `gguf_converted.py` has the others."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig

from tests import gguf_converted as converted
from tests.gguf_converted import Architecture, Tensors

_MIXER = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
_QWEN4_NAMES = {
    **{f"attn_hyper_connection.{part}.weight": f"hc_attn_{name}.weight" for part, name in _MIXER.items()},
    **{f"mlp_hyper_connection.{part}.weight": f"hc_ffn_{name}.weight" for part, name in _MIXER.items()},
    **{f"model.hyper_connection_mixer.{part}.weight": f"output_hc_{name}.weight" for part, name in _MIXER.items()},
    "self_attn.indexer.q_layernorm.weight": "indexer.q_norm.weight",
    "self_attn.indexer.k_layernorm.weight": "indexer.k_norm.weight",
    "ple.key_proj.weight": "ple_key.weight",
    "ple.value_proj.weight": "ple_value.weight",
    "ple.norm_key.weight": "ple_norm_key.weight",
    "ple.norm_query.weight": "ple_norm_query.weight",
    "ple.norm_conv.weight": "ple_norm_conv.weight",
    "ple.conv1d.weight": "ple_conv1d.weight",
}


def _qwen4(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """Norms plus one, and the indexer's queries and keys apart. The numbers of the hash function are metadata."""
    if rest.startswith("ple.ple_embedding."):
        return  # the table belongs to no layer: see `_table`
    if rest == "self_attn.indexer.index_qk_proj.weight":
        queries = config.indexer_n_heads * config.indexer_head_dim
        yield "indexer.q_proj.weight", weight[:queries]
        yield "indexer.k_proj.weight", weight[queries:]
    elif rest in _QWEN4_NAMES:
        weight = weight + 1 if "norm" in rest else weight
        yield _QWEN4_NAMES[rest], weight.squeeze(1) if "conv1d" in rest else weight
    else:
        yield from converted.qwen3_5(rest, weight, config)


def _table(model: Any) -> dict[str, torch.Tensor]:
    return {"per_layer_token_embd.weight": model.model.layers[2].ple.ple_embedding.ngram_embedding.weight}


def _qwen4_metadata(config: PretrainedConfig) -> dict[str, Any]:
    hash_numbers = _hash_numbers(config)
    return {
        **converted.mrope_metadata(config),
        "attention.compress_ratios": [
            config.indexer_compress_ratio * (kind != "linear_attention") for kind in config.layer_types
        ],
        "attention.indexer.head_count": config.indexer_n_heads,
        "attention.indexer.key_length": config.indexer_head_dim,
        "attention.indexer.top_k": config.indexer_budget,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "embedding_length_per_layer_input": config.ple_embed_dim // len(hash_numbers["head_offsets"]),
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_id,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.layers": [layer - 1 for layer in config.ple_layer_ids],
        "ple.ngram_size": config.ngram_size,
        **{f"ple.{name}": numbers for name, numbers in hash_numbers.items()},
    }


def _hash_numbers(config: PretrainedConfig) -> dict[str, list[int]]:
    """The buffers of the library's table."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    table = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0)
    return {
        "layer_multipliers": table.layer_multipliers.tolist(),
        "head_offsets": table.head_offsets,
        "head_vocab_sizes": table.head_vocab_sizes,
    }


QWEN4 = Architecture(
    "qwen4exp",
    "qwen4_exp_text",
    {
        **converted.STATE,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 32,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "output_gate_type": "sigmoid",
        "rope_parameters": {
            **converted.STATE["rope_parameters"],
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "hc_lowrank": 32,
        "indexer_head_dim": 32,
        "ple_layer_ids": [3],
        "ple_embed_dim": 64,
        "ple_conv_kernel_size": 3,
        "ngram_size": 3,
        "heads_per_ngram": 1,
        "ngram_vocab_size_base": 101,
        "seed": 77,
    },
    _qwen4,
    _qwen4_metadata,
    "qwen35",
    # the file has the numbers that follow from the seed; the parts are those of a release in safetensors
    frozenset({"seed", "split_ngram_parts"}),
    _table,
)


def _glm5(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    names = {
        **converted.V4_NAMES,
        "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
        "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    }
    if rest in names:
        yield names[rest], weight
    elif rest.startswith("self_attn.indexer."):
        yield from converted.indexed(rest, weight, config)
    else:
        yield from converted.kimi_linear(rest, weight, config)


def _glm5_metadata(config: PretrainedConfig) -> dict[str, Any]:
    limits = [config.swiglu_limit] * config.num_hidden_layers
    return {
        "attention.head_count_kv": [int(kind != "linear_attention") for kind in config.layer_types],
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.kpool": config.index_kpool,
        "attention.indexer.kpool_select_tail": config.index_kpool_always_select_tail,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
        "attention.key_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.layer_norm_epsilon": 1e-6,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.value_length": config.kv_lora_rank,
        "attention.value_length_mla": config.v_head_dim,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.epsilon": config.hc_eps,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "kda.gate_lower_bound": config.linear_lower_bound,
        "kda.head_dim": config.linear_head_dim,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "rope.dimension_count": 0,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
        "vocab_size": config.vocab_size,
    }


GLM5 = Architecture(
    "glm5-next",
    "glm5_next_text",
    {
        **{key: value for key, value in converted.LATENT.items() if key != "first_k_dense_replace"},
        "qk_rope_head_dim": 0,
        "hc_eps": 1e-5,
        "hc_sinkhorn_iters": 5,
        "index_head_dim": 32,
        "index_kpool": 4,
        "linear_conv_kernel_dim": 3,
        "linear_head_dim": 32,
        "linear_lower_bound": -3.0,
        "linear_num_heads": 4,
        "n_group": 4,
        "topk_group": 2,
        "swiglu_limit": 4.0,
    },
    _glm5,
    _glm5_metadata,
    "glm4",
)
ARCHITECTURES = {"glm5-next": GLM5, "qwen4exp": QWEN4}
