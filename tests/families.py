"""A toy of any family that the installed transformers has: its own configuration, small by the names of its fields.

For what is asked of all families at once; the eighteen of `zoo.py`, made by hand, are what most tests use.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

from tests import zoo

_HAS_EXPERTS = re.compile(r"^class \w*(Experts|MoE|Moe|MoeBlock|MoEBlock|Router)\w*\(", re.MULTILINE)

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_heads", "swa_num_attention_heads", "num_sliding_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "model_max_length"), 256),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size", "router_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), zoo.EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_head_dim", "ssm_state_size", "kv_channels"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "gated_norm_rank", "index_topk"), 8),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_chunk_size", "hidden_size_per_layer_input"), 8
    ),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "index_n_heads", "index_block_size"), 4),
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "o_groups", "n_group", "num_expert_group"), 2),
    **dict.fromkeys(("attn_layer_period", "global_attn_every_n_layers", "index_topk_blocks", "layer_group_size"), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_num_shared_experts", "attn_layer_offset"), 1),
    "topk_group": 1,
    "q_lora_rank": 24,
    "rel_extent": 16,
    "num_nextn_predict_layers": 0,
    "enable_moe_block": True,
}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TURNS = [4, 2, 2]
"""Of rotary embeddings in three dimensions: time, height, width."""
_TEXT: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": zoo.EXPERTS, "moe_top_k": 2, "hidden_size": 64},
    },
    "jamba": {"use_mamba_kernels": False},
    "llama4_text": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "inkling_text": {"tie_word_embeddings": False, "layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_text": {"tie_word_embeddings": False, "layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "dots3_note_text": {
        **{f"swa_{name}": 2 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
        "swa_head_dim": 24,
        "head_dim": 24,
    },
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "hc_lowrank": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 4,
    },
    "glm5_next_text": {
        "index_kpool": 2,
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "glm4v_moe_text": {
        "n_group": 1,
        "n_shared_experts": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
        },
    },
    "qwen3_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": _TURNS},
    },
}
_VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "projector_input_dim", "projector_output_dim"), 32),
    **dict.fromkeys(("vision_output_dim", "embed_dim", "width"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "heads"), 2),
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "head_dim": 16,
    "global_head_dim": 16,
    "deepstack_visual_indexes": [],
    "fullatt_block_indexes": [0],
}


def model_types() -> list[str]:
    """Every `model_type` with experts or routers in its source that the library has a class for that writes text."""
    folder = Path(transformers.__file__).parent / "models"
    with_experts = {
        file.parent.name for file in folder.glob("*/modeling_*.py") if _HAS_EXPERTS.search(file.read_text("utf-8"))
    }
    names = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    writes = {model_type for mapping in names for model_type in mapping}
    return sorted(t for t in CONFIG_MAPPING_NAMES if t in writes and model_type_to_module_name(t) in with_experts)


def config_of(model_type: str) -> PretrainedConfig:
    """The family's own configuration, small; of one with images, with a small text part and hardly any other."""
    given = CONFIG_MAPPING[model_type]().to_dict()
    if "text_config" not in given:
        return AutoConfig.for_model(model_type, **_text(model_type, given))
    parts: dict[str, Any] = {}
    for name, part in given.items():
        if name == "text_config":
            of_text = part["model_type"]
            parts[name] = {**_text(of_text, part), "model_type": of_text}
        elif name.endswith("_config") and isinstance(part, dict):
            parts[name] = {key: _VISION[key] for key in _VISION if key in part} | {"model_type": part["model_type"]}
    tokens = {
        key: 120 for key, value in given.items() if re.search(r"_token_(id|index)$", key) and isinstance(value, int)
    }
    return AutoConfig.for_model(model_type, **parts, **{**tokens, **_ENDS}, tie_word_embeddings=False)


def _text(model_type: str, given: dict[str, Any]) -> dict[str, Any]:
    sizes = {key: value for key, value in _SIZES.items() if given.get(key) is not None or key == "top_k_experts"}
    sizes |= {key: _SIZES[key] for key in ("num_experts", "moe_intermediate_size", "max_seq_len") if key in given}
    if given.get("kv_lora_rank"):
        sizes["num_key_value_heads"] = 4
        sizes.pop("head_dim", None)
    return {**{key: value for key, value in sizes.items() if key in given}, **_ENDS, **_TEXT.get(model_type, {})}


def reference(folder: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """transformers alone on a checkpoint, eager experts."""
    is_of_text = AutoConfig.from_pretrained(folder).model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    own = AutoModelForCausalLM if is_of_text else AutoModelForImageTextToText
    return eager(own.from_pretrained, folder, dtype)


def save(model_type: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A toy of the family with seeded random weights, as the library saves it, images included. `changes`: fields of
    its configuration."""
    has_images = model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    own = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = config_of(model_type)
        config.update(changes)
        model = eager(own.from_config, config, dtype)
    zoo.fill(model, dtype)
    model.save_pretrained(folder)
    if model_type == "deepseek_v4":  # which the library saves by a name that it does not read; this is the released one
        tensors = load_file(folder / "model.safetensors")
        tensors["norm.weight"] = tensors.pop("model.norm.weight")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def eager(make: Any, of: Any, dtype: torch.dtype) -> PreTrainedModel:
    """By a class whose experts can be chosen, or by one whose cannot."""
    try:
        model: PreTrainedModel = make(of, dtype=dtype, experts_implementation="eager")
    except ValueError as error:
        if "experts" not in str(error):
            raise
        model = make(of, dtype=dtype)
    return model.eval()
