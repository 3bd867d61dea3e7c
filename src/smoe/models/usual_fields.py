"""Reads the sizes of a model from a config.json by the usual names of its fields, whatever the family is.

Families give different names to the same size. The names in the tables are those of published configurations. A field
whose value differs by layer has a list, of which the largest value is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smoe.memory.dtypes import BY_NAME
from smoe.models.plain_config import PlainConfig
from smoe.models.released_schemes import TEXT_CONFIGS

_NEEDED: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim"),
    "num_experts": (
        "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts", "n_experts",
    ),
    "num_experts_per_tok": (
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
        "moe_router_topk", "num_selected_experts", "experts_per_token",
    ),
    "moe_intermediate_size": (
        "moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size", "expert_intermediate_size",
        "expert_hidden_size", "intermediate_size", "ffn_hidden_size", "ffn_dim", "d_ff",
    ),
}  # fmt: skip
"""{size without which nothing can be estimated: its names}."""
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "num_attention_heads": ("num_attention_heads", "n_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads", "num_attention_groups"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_position_embeddings": ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "d_ff"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
_INNER_CONFIGS = ("ffn_config", "moe_config", "moe", "attn_config")
"""Names of objects within the language model's configuration that contain some of its sizes."""
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "n_dense_layers", "moe_layer_start_index")
_PERIODS = (
    "expert_layer_period", "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "moe_layer_freq",
)  # fmt: skip
"""The names of: the number of first layers without experts; the distance between layers with experts."""
_USUAL_HEAD, _USUAL_VOCABULARY = 128, 131_072
"""The size of an attention head, and the number of tokens of the vocabulary, if no field has them."""
_SEEMS_DENSE = "The model seems to have no experts, and smoe is for Mixture-of-Experts models"


class LackingSizesError(Exception):
    """A configuration lacks sizes without which a model cannot be estimated. The argument is a phrase with them."""


def usual_config(model_type: str, fields: Mapping[str, Any]) -> tuple[PlainConfig, tuple[str, ...]]:
    """Return (the configuration with sizes by their usual names, remarks about sizes that are assumed).

    `fields`: those of a whole config.json. Besides the usual fields, the configuration has `shared_experts` (their
    number, or 0) and `expert_layers` (the numbers of the layers with experts). Raise `LackingSizesError` if a size is
    missing.
    """
    text = _of_text(fields)
    places = [text, *(text[name] for name in _INNER_CONFIGS if isinstance(text.get(name), Mapping))]
    found = {size: _size(places, names) for size, names in (_NEEDED | _OPTIONAL).items()}
    lacking = [repr(size) for size in _NEEDED if found[size] is None]
    if lacking:
        named = f"the field{'s' * (len(lacking) > 1)} {', '.join(lacking)}"
        dense = "" if any(map(_has_experts, places)) else f". {_SEEMS_DENSE}"
        raise LackingSizesError(f"config.json lacks {named}, and similar ones{dense}")
    stated = {size: value for size, value in found.items() if value is not None}
    remarks = [f"config.json has no {size}: {value:,} is assumed" for size, value in _assumed(stated).items()]
    stated = _assumed(stated) | stated
    stated.setdefault("num_key_value_heads", stated["num_attention_heads"])
    stated.setdefault("shared_experts", int("shared_expert_intermediate_size" in stated))
    dtypes = [each[key] for each in (text, fields) for key in ("dtype", "torch_dtype") if each.get(key)]
    more = {
        "q_lora_rank": found["q_lora_rank"],
        "dtype": next((each for each in dtypes if isinstance(each, str) and each in BY_NAME), None),
        "tie_word_embeddings": text.get("tie_word_embeddings") is True,
        "expert_layers": _expert_layers(text, stated["num_hidden_layers"]),
    }
    return PlainConfig(model_type, stated | more, {}, {}, fields), tuple(remarks)


def _of_text(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the language model."""
    nested = (fields[name] for name in TEXT_CONFIGS if isinstance(fields.get(name), Mapping))
    return next(nested, fields)


def _has_experts(fields: Mapping[str, Any]) -> bool:
    """Return whether any field with a value is about experts, by its name."""
    return any(value and ("expert" in name.lower() or "moe" in name.lower()) for name, value in fields.items())


def _size(places: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int | None:
    """Return the size that one of these fields has; the largest one of a list. None if no field has a size."""
    for name in names:
        for each in places:
            value = each.get(name)
            sizes = [size for size in (value if isinstance(value, list) else [value]) if type(size) is int and size > 0]
            if sizes:
                return max(sizes)
    return None


def _assumed(stated: Mapping[str, int]) -> dict[str, int]:
    """Return sizes that are assumed because the configuration lacks them."""
    usual = {
        "num_attention_heads": max(1, stated["hidden_size"] // stated.get("head_dim", _USUAL_HEAD)),
        "vocab_size": _USUAL_VOCABULARY,
    }
    return {size: value for size, value in usual.items() if size not in stated}


def _expert_layers(text: Mapping[str, Any], layers: int) -> list[int]:
    """Return the numbers of the layers with experts. Without fields about it, these are all layers."""
    flags, listed, without = (text.get(name) for name in ("moe_layer_freq", "moe_layers", "mlp_only_layers"))
    if isinstance(flags, list) and len(flags) == layers:
        found = [layer for layer, flag in enumerate(flags) if flag]
    elif isinstance(listed, list) and listed:
        found = [layer for layer in range(layers) if layer in listed]
    else:
        first, period = _size([text], _DENSE_FIRST) or 0, _size([text], _PERIODS) or 1
        dense = without if isinstance(without, list) else []
        found = [layer for layer in range(first, layers) if (layer + 1) % period == 0 and layer not in dense]
    return found or list(range(layers))
