"""Toys saved under the names of tensors and fields that publishers use, as llama.cpp's converter expects them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.gguf_converted import Architecture, pairs_at_the_end

Fields = dict[str, Any]


def _mimo(fields: Fields) -> None:
    rope = fields.pop("rope_parameters")
    fields["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in fields["layer_types"]]
    fields.update(
        layernorm_epsilon=fields["rms_norm_eps"],
        partial_rotary_factor=0.5,
        rope_theta=rope["full_attention"]["rope_theta"],
        scoring_func="sigmoid",
        sliding_window=fields["sliding_window"] - 1,
        swa_head_dim=fields["head_dim"],
        swa_num_attention_heads=fields["num_attention_heads"],
        swa_num_key_value_heads=2 * fields["num_key_value_heads"],
        swa_rope_theta=rope["sliding_attention"]["rope_theta"],
        swa_v_head_dim=fields["v_head_dim"],
        topk_method="noaux_tc",
    )


def _hunyuan(fields: Fields) -> None:
    for name, value in (("moe_intermediate_size", fields["intermediate_size"]), ("num_shared_expert", 1)):
        fields[name] = [value] * fields["num_hidden_layers"]
    fields["moe_topk"] = [fields["moe_topk"]] * fields["num_hidden_layers"]
    fields["rope_scaling"] = None


def _granite_hybrid(fields: Fields) -> None:
    kinds = {"full_attention": "attention", "linear_attention": "mamba"}
    fields["layer_types"] = [kinds[kind] for kind in fields["layer_types"]]


def _granite_windows(fields: Fields) -> None:
    fields["no_rope_layers"] = [int(bool(theta)) for theta in fields["layer_rope_theta"]]


def _qwen_state(fields: Fields) -> None:
    fields["full_attention_interval"] = 2


def _qwen4(fields: Fields) -> None:
    fields["layer_types"] = [kind.replace("indexed", "full") for kind in fields["layer_types"]]


def _glm5(fields: Fields) -> None:
    fields.update(
        architectures=["Glm5NextForConditionalGeneration"],
        first_k_dense_replace=fields["mlp_layer_types"].count("dense"),
        mla_use_nope=True,
        linear_attn_config={
            "gate_lower_bound": fields["linear_lower_bound"],
            "head_dim": fields["linear_head_dim"],
            "num_heads": fields["linear_num_heads"],
            "short_conv_kernel_size": fields["linear_conv_kernel_dim"],
        },
    )


def _dots3(fields: Fields) -> None:
    rope, near = fields.pop("rope_parameters"), fields["per_layer_config"]["1"]
    names = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "head_dim")
    fields |= {f"swa_{name}": near[name] for name in names}
    fields["layer_types"] = [kind.replace("indexed", "full") for kind in fields["layer_types"]]
    fields.update(
        apply_mla_qkv_lora_rescale=True,
        architectures=["Dots3NoteForCausalLM"],
        first_k_dense_replace=fields["mlp_layer_types"].count("dense"),
        rope_theta=rope["indexed_attention"]["rope_theta"],
        scoring_func="sigmoid",
        sliding_window_size=fields["sliding_window"],
        swa_q_lora_rank=fields["q_lora_rank"],
        swa_qk_rope_head_dim=fields["qk_rope_head_dim"],
        swa_rope_theta=rope["sliding_attention"]["rope_theta"],
    )


_FIELDS: Mapping[str, Callable[[Fields], None]] = {
    "dots3note": _dots3,
    "glm5-next": _glm5,
    "granite_swa": _granite_windows,
    "granitehybrid": _granite_hybrid,
    "hunyuan-moe": _hunyuan,
    "mimo2": _mimo,
    "qwen35moe": _qwen_state,
    "qwen3next": _qwen_state,
    "qwen4exp": _qwen4,
}
"""Changes of the fields that transformers saves, by architecture."""
_LAGUNA = (
    (r"mlp\.gate\.e_score_correction_bias", "mlp.experts.e_score_correction_bias"),
    (r"mlp\.shared_experts\.", "mlp.shared_expert."),
)
_NAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "hy_v3": (
        (r"mlp\.gate\.weight", "mlp.router.gate.weight"),
        (r"mlp\.e_score_correction_bias", "mlp.expert_bias"),
        (r"mlp\.shared_experts\.", "mlp.shared_mlp."),
    ),
    "hy_v4": (
        (r"hc_pre\.hc_head\.", "hc_head."),
        (r"mlp\.linear_gate", "mlp.gate_proj"),
        (r"shared_experts\.linear_gate", "shared_experts.gate_proj"),
        (r"hc_pre\.hc_(attn|mlp)_layer", r"hc_\1_layer.hc_pre"),
    ),
    "laguna": _LAGUNA,
    "mimo2": ((r"self_attn\.sinks", "self_attn.attention_sink_bias"),),
}
"""Changes of the names that transformers saves, by architecture."""


def save(family: Architecture, model: PreTrainedModel, folder: Path) -> None:
    """Save a toy as its publisher would."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for old, new in _NAMES.get(family.name, ()):
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    if family.name == "hy_v4":
        tensors = {name: _neighbours(name, tensor, model.config) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    _FIELDS.get(family.name, lambda _: None)(fields)
    path.write_text(json.dumps(fields))


def _neighbours(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Hunyuan 4 is published for embeddings that rotate neighbours; transformers' class rotates rows half a head
    apart."""
    heads = {"q_b_proj": config.num_attention_heads, "indexer.wq_b": config.index_n_heads}
    heads |= dict.fromkeys(("kv_a_proj_with_mqa", "indexer.wk", "indexer.k_norm"), 1)
    found = next((count for part, count in heads.items() if f".{part}." in name), None)
    return tensor if found is None else pairs_at_the_end(tensor, found, config.qk_rope_head_dim).contiguous()
