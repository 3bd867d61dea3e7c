"""Toys of architectures whose files have other matrices than the library, written as llama.cpp's converter writes them.

Names, orders of rows and shapes are spelled out here once more, so that a wrong one in the reader's tables shows. Every
setting of a toy differs from what goes without saying, and matrices hold but +-127 / 2^n: in Q8_0 they are exactly the
same numbers, in whichever order, so that the library's own model is what a file's logits are compared with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import GGMLQuantizationType as Type
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from smoe.models import registration
from tests import families, gguf_toy, zoo

Tensors = Iterator[tuple[str, torch.Tensor]]

_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_USUAL = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{kind}_proj.weight": f"attn_{kind}.weight" for kind in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    **{f"mlp.{name}.weight": f"ffn_{kind}.weight" for name, kind in _MLP.items()},
    **{f"mlp.shared_expert.{name}.weight": f"ffn_{kind}_shexp.weight" for name, kind in _MLP.items()},
    **{f"mlp.shared_experts.{name}.weight": f"ffn_{kind}_shexp.weight" for name, kind in _MLP.items()},
}


_WIDE = r"ffn_gate_inp|ssm_(?!in|out)|norm|hc_|_ape"
"""Tensors that the converter writes in F32 whatever the type of the others."""


class Architecture(NamedTuple):
    """How one architecture's files are written."""

    name: str
    """In files."""
    model_type: str
    config: Mapping[str, Any]
    """Of the toy, besides `families.py`'s."""
    convert: Callable[[str, torch.Tensor, PretrainedConfig], Tensors]
    """The tensors, by their names in a layer, of a weight of a layer, by the library's name there."""
    metadata: Callable[[PretrainedConfig], dict[str, Any]]
    """Besides what all files have."""
    split: str = "qwen2"
    unsaid: frozenset[str] = frozenset()
    """Fields of the configuration that no file says, and that compute nothing."""
    more: Callable[[PreTrainedModel], dict[str, torch.Tensor]] = lambda model: {}
    """Tensors that are made of several weights."""


_DERIVED = ("qk_head_dim", "per_layer_config")
"""Fields of a configuration that follow from others."""


def make(family: Architecture, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """The library's model, seeded."""
    base = {key: value for key, value in families.config_of(family.model_type).to_dict().items() if key not in _DERIVED}
    config = AutoConfig.for_model(**{**base, "rms_norm_eps": 1e-4, **family.config, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        is_text = family.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        has_images = family.model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not is_text
        own = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
        if not (is_text or has_images) and family.model_type not in registration.LOCAL_FAMILIES:
            own = registration.opened_family(family.model_type)
        model = families.eager(own.from_config, config, dtype)
    zoo.fill(model, dtype)
    _only_signs(model)
    ready: PreTrainedModel = model.eval()
    return ready


_AS_IT_IS = r"\bgate\.weight|router|conv1d|conv\.conv|A_log|_hc\.|hc_head|position_bias"
"""Matrices that files have in F32."""


@torch.no_grad()
def _only_signs(model: PreTrainedModel) -> None:
    """Every other matrix: +-127 / 2^n, about as large as before."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not re.search(
            r"\bgate\.weight|router|conv1d|conv\.conv|A_log|_hc\.|hc_head|position_bias", name
        ):
            size = 127 * 2.0 ** round(float(parameter.float().std().log2()) - 7)
            parameter.copy_(parameter.sign().masked_fill(parameter == 0, 1) * size)


def tensors_of(family: Architecture, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's weights as files have them, by their names there."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        weight = weight.float() if weight.is_floating_point() else weight  # as the converter computes
        layer = re.fullmatch(r"(?:model\.layers|transformer\.blocks)\.(\d+)\.(.*)", name)
        if layer is None:
            found |= dict(family.convert(name, weight, model.config))
        else:
            found |= {f"blk.{layer[1]}.{key}": each for key, each in family.convert(layer[2], weight, model.config)}
    return found


def write(path: Path, family: Architecture, model: PreTrainedModel, kind: Type = Type.F32, **changes: Any) -> Path:
    """A file of `model`, whose matrices are of the type `kind`; `changes` are as `gguf_toy.write_file` has them, or
    `metadata` and `tensors` that take the place of others."""
    metadata = {**common(model.config), **family.metadata(model.config), **changes.pop("metadata", {})}
    tensors = {**tensors_of(family, model), **family.more(model), **changes.pop("tensors", {})}
    given = {"experts": kind, "dense": kind, "split": family.split, "wide": _WIDE} | changes
    return gguf_toy.write_file(path, family.name, metadata, tensors, **given)


def common(config: PretrainedConfig) -> dict[str, Any]:
    """What the converter takes of every config.json."""
    given = config.to_dict()
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": given.get("num_attention_heads") or config.num_attention_heads,
        "attention.head_count_kv": given.get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 1e-6),
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
    }
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_theta"):
        found["rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
            "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
        }
    return found


def usual(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """Under another name, and the experts' gate and up apart."""
    if rest.endswith("experts.gate_up_proj"):
        gate, up = weight.chunk(2, 1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    elif rest.endswith("experts.down_proj"):
        yield "ffn_down_exps.weight", weight
    else:
        yield (_GLOBAL.get(rest) or _USUAL[rest]), weight


_LATENT_NAMES = {
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
}


def _latent(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """The keys' part of `kv_b`, head by head and the other way round, and the values' part."""
    if rest == "self_attn.kv_b_proj.weight":
        heads = weight.view(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, -1)
        yield "attn_k_b.weight", heads[:, : config.qk_nope_head_dim].transpose(1, 2)
        yield "attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
    elif rest in _LATENT_NAMES:
        yield _LATENT_NAMES[rest], weight
    else:
        yield from usual(rest, weight, config)


def _latent_metadata(config: PretrainedConfig) -> dict[str, Any]:
    found = {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "leading_dense_block_count": 1,
        "rope.dimension_count": config.qk_rope_head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.rope_parameters.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    return found


def _latent_sigmoid(config: PretrainedConfig) -> dict[str, Any]:
    return {**_latent_metadata(config), "expert_gating_func": 2, "expert_weights_norm": True}


LATENT: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "routed_scaling_factor": 1.5,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "mscale": 0.75,
    "mscale_all_dim": 0.75,
}

DEEPSEEK_V2 = Architecture(
    "deepseek2",
    "deepseek_v2",
    {
        **LATENT,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "rope_parameters": _YARN,
    },
    _latent,
    _latent_metadata,
    "deepseek-llm",
)
DEEPSEEK_V2_LITE = DEEPSEEK_V2._replace(
    config={**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
)
DEEPSEEK_V3 = Architecture(
    "deepseek2",
    "deepseek_v3",
    {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN},
    _latent,
    _latent_sigmoid,
    "deepseek-v3",
    frozenset({"num_nextn_predict_layers"}),
)
GLM4_MOE_LITE = Architecture(
    "deepseek2", "glm4_moe_lite", {**LATENT, "n_group": 1, "topk_group": 1}, _latent, _latent_sigmoid, "glm4"
)

_STATE_NAMES = {
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
}


def _qwen3_next(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """Norms plus one, decays as -exp, queries, keys, values and gates each for all heads."""
    if rest.endswith("norm.weight") and rest != "linear_attn.norm.weight":
        weight = weight + 1
    if rest == "linear_attn.A_log":
        yield "ssm_a", -weight.exp()
    elif rest == "linear_attn.conv1d.weight":
        yield "ssm_conv1d.weight", weight.squeeze(1)
    elif rest == "linear_attn.in_proj_qkvz.weight":
        key, values = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
        widths = [key, key, values * config.linear_value_head_dim, values * config.linear_value_head_dim]
        heads = weight.view(config.linear_num_key_heads, sum(widths), -1)
        q, k, v, z = (each.flatten(0, 1) for each in heads.split(widths, 1))
        yield "attn_qkv.weight", torch.cat([q, k, v])
        yield "attn_gate.weight", z
    elif rest in _STATE_NAMES:
        yield _STATE_NAMES[rest], weight
    else:
        yield from usual(rest, weight, config)


def _value_heads(weight: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """The first value head of every key head, then the second of every one, ..."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    order = [key * (values // keys) + n for n in range(values // keys) for key in range(keys)]
    return weight.view(values, -1, *weight.shape[1:])[order].view(weight.shape)


def qwen3_5(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """As above, and value heads in another order, also in the columns of the output matrix."""
    if re.fullmatch(r"linear_attn\.(in_proj_[zab]\.weight|A_log|dt_bias)", rest):
        weight = _value_heads(weight, config)
    elif rest in ("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"):
        keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        weight = torch.cat([weight[:keys], _value_heads(weight[keys:], config)])
    elif rest == "linear_attn.out_proj.weight":
        weight = _value_heads(weight.T.contiguous(), config).T
    yield from _qwen3_next(rest, weight, config)


def _state_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 2,
    }


def mrope_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {**_state_metadata(config), "rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0]}


STATE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 3,
    "shared_expert_intermediate_size": 64,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}
QWEN3_NEXT = Architecture("qwen3next", "qwen3_next", STATE, _qwen3_next, _state_metadata)
QWEN3_5_MOE = Architecture(
    "qwen35moe",
    "qwen3_5_moe_text",
    {
        **STATE,
        "rope_parameters": {**STATE["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
    qwen3_5,
    mrope_metadata,
    "qwen35",
)


def _pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The two rows of a head that a position turns together next to each other."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def granite(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if rest.startswith(("self_attn.q_proj", "self_attn.k_proj")):
        is_query = rest.startswith("self_attn.q_proj")
        weight = _pairs(weight, config.num_attention_heads if is_query else config.num_key_value_heads)
    if rest == "block_sparse_moe.router.weight":
        yield "ffn_gate_inp.weight", weight
    elif rest == "shared_mlp.input_linear.weight":
        yield "ffn_gate_shexp.weight", weight.chunk(2)[0]
        yield "ffn_up_shexp.weight", weight.chunk(2)[1]
    elif rest == "shared_mlp.output_linear.weight":
        yield "ffn_down_shexp.weight", weight
    else:
        yield from usual(rest, weight, config)


_MAMBA = {"in_proj.weight": "ssm_in.weight", "out_proj.weight": "ssm_out.weight", "conv1d.bias": "ssm_conv1d.bias"}


def _granite_hybrid(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    part = rest.removeprefix("mamba.")
    if part == rest:
        yield from granite(rest, weight, config)
    elif part == "A_log":
        yield "ssm_a", -weight.exp().unsqueeze(1)
    elif part == "D":
        yield "ssm_d", weight.unsqueeze(1)
    elif part == "dt_bias":
        yield "ssm_dt.bias", weight
    elif part == "norm.weight":
        yield "ssm_norm.weight", weight.view(config.mamba_n_groups, -1)
    elif part == "conv1d.weight":
        yield "ssm_conv1d.weight", weight.squeeze(1)
    else:
        yield _MAMBA[part], weight


def granite_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "expert_count": config.num_local_experts,
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
    }


def _granite_hybrid_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **granite_metadata(config),
        "attention.head_count_kv": [2 * (kind == "full_attention") for kind in config.layer_types],
        "rope.dimension_count": None,
        "rope.scaling.finetuned": False,
        "context_length": 2**20,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.125,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 2.0,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
GRANITE_MOE = Architecture("granitemoe", "granitemoe", GRANITE, granite, granite_metadata, "refact")
GRANITE_MOE_SHARED = GRANITE_MOE._replace(
    model_type="granitemoeshared", config={**GRANITE, "shared_intermediate_size": 64}
)
GRANITE_MOE_HYBRID = Architecture(
    "granitehybrid",
    "granitemoehybrid",
    {
        **GRANITE,
        "shared_intermediate_size": 64,
        "mamba_n_groups": 2,
        "mamba_d_conv": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "position_embedding_type": "nope",
    },
    _granite_hybrid,
    _granite_hybrid_metadata,
    "refact",
    frozenset({"max_position_embeddings", "rope_parameters"}),
)


def _dots_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "leading_dense_block_count": config.first_k_dense_replace,
    }


_THETA: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
DOTS = Architecture(
    "dots1",
    "dots1",
    {
        **_THETA,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": zoo.EXPERTS,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 4,
    },
    usual,
    _dots_metadata,
    unsaid=frozenset({"max_window_layers"}),
)


def _ernie(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if rest == "mlp.gate.moe_statics.e_score_correction_bias":
        yield "exp_probs_b.bias", weight.flatten()
    else:
        yield from usual(rest, weight, config)


def _ernie_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.intermediate_size // config.num_key_value_heads,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
    }


ERNIE = Architecture(
    "ernie4_5-moe",
    "ernie4_5_moe",
    {
        **_THETA,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_num_shared_experts": 2,
    },
    _ernie,
    _ernie_metadata,
)


def _hunyuan(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    names = {"query_layernorm": "q_norm", "key_layernorm": "k_norm", "shared_mlp": "shared_expert", "gate.wg": "gate"}
    for theirs, common_name in names.items():
        rest = rest.replace(f".{theirs}.", f".{common_name}.")
    yield from usual(rest, weight, config)


def _hunyuan_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.moe_topk,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
    }


HUNYUAN = Architecture(
    "hunyuan-moe",
    "hunyuan_v1_moe",
    {**_THETA, "num_experts": zoo.EXPERTS, "moe_topk": 2, "head_dim": 16, "num_key_value_heads": 2},
    _hunyuan,
    _hunyuan_metadata,
    "hunyuan",
    frozenset({"eod_token_id", "sep_token_id"}),
)

_LFM2_NAMES = {
    "conv.in_proj.weight": "shortconv.in_proj.weight",
    "conv.out_proj.weight": "shortconv.out_proj.weight",
    "feed_forward.w1.weight": "ffn_gate.weight",
    "feed_forward.w2.weight": "ffn_down.weight",
    "feed_forward.w3.weight": "ffn_up.weight",
    "feed_forward.gate.weight": "ffn_gate_inp.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "operator_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "self_attn.out_proj.weight": "attn_output.weight",
    "self_attn.q_layernorm.weight": "attn_q_norm.weight",
    "self_attn.k_layernorm.weight": "attn_k_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
}


def _lfm2(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if rest == "conv.conv.weight":
        yield "shortconv.conv.weight", weight.squeeze(1)
    elif rest in _LFM2_NAMES:
        yield _LFM2_NAMES[rest], weight
    else:
        yield from usual(rest, weight, config)


def _lfm2_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [2 * (kind == "full_attention") for kind in config.layer_types],
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "leading_dense_block_count": config.num_dense_layers,
        "shortconv.l_cache": config.conv_L_cache,
    }


LFM2 = Architecture(
    "lfm2moe",
    "lfm2_moe",
    {
        **_THETA,
        "norm_eps": 1e-4,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "conv_L_cache": 4,
    },
    _lfm2,
    _lfm2_metadata,
    "lfm2",
    frozenset({"rms_norm_eps"}),
)

_JAMBA_NAMES = {
    **{f"mamba.{part}": name for part, name in _MAMBA.items()},
    **{f"mamba.{kind}_layernorm.weight": f"ssm_{kind}_norm.weight" for kind in ("dt", "b", "c")},
    "mamba.D": "ssm_d",
    "mamba.x_proj.weight": "ssm_x.weight",
    "mamba.dt_proj.weight": "ssm_dt.weight",
    "mamba.dt_proj.bias": "ssm_dt.bias",
    "pre_ff_layernorm.weight": "ffn_norm.weight",
    "feed_forward.router.weight": "ffn_gate_inp.weight",
    "model.final_layernorm.weight": "output_norm.weight",
}


def _jamba(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if rest == "mamba.A_log":
        yield "ssm_a", -weight.exp()
    elif rest == "mamba.conv1d.weight":
        yield "ssm_conv1d.weight", weight.squeeze(1)
    elif rest in _JAMBA_NAMES:
        yield _JAMBA_NAMES[rest], weight
    else:
        yield from usual(rest.replace("feed_forward.", "mlp."), weight, config)


def _jamba_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [2 * (kind == "full_attention") for kind in config.layer_types],
        "expert_count": config.num_experts,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_dt_rank,
    }


JAMBA = Architecture(
    "jamba",
    "jamba",
    {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_conv": 3, "num_key_value_heads": 2, "num_experts": 8},
    _jamba,
    _jamba_metadata,
    unsaid=frozenset({"use_mamba_kernels"}),
)

_NEMOTRON_NAMES = {
    "norm.weight": "attn_norm.weight",
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
    **{f"mixer.{kind}_proj.weight": f"attn_{kind}.weight" for kind in "qkv"},
    "mixer.o_proj.weight": "attn_output.weight",
    **{f"mixer.{part}": name for part, name in _MAMBA.items()},
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
    **{f"mixer.{kind}_proj.weight": f"ffn_{kind}.weight" for kind in ("up", "down")},
    **{f"mixer.experts.{kind}_proj": f"ffn_{kind}_exps.weight" for kind in ("up", "down")},
    **{f"mixer.shared_experts.{kind}_proj.weight": f"ffn_{kind}_shexp.weight" for kind in ("up", "down")},
}


def _nemotron(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """Rows of queries and keys move, although the model has no positions."""
    if rest in ("mixer.q_proj.weight", "mixer.k_proj.weight"):
        weight = _pairs(weight, config.num_attention_heads if "q_proj" in rest else config.num_key_value_heads)
    if rest == "mixer.A_log":
        yield "ssm_a", -weight.exp().unsqueeze(1)
    elif rest == "mixer.D":
        yield "ssm_d", weight.unsqueeze(1)
    elif rest == "mixer.norm.weight":
        yield "ssm_norm.weight", weight.view(config.n_groups, -1)
    elif rest == "mixer.conv1d.weight":
        yield "ssm_conv1d.weight", weight.squeeze(1)
    else:
        yield (_GLOBAL.get(rest) or _NEMOTRON_NAMES[rest]), weight


def _nemotron_metadata(config: PretrainedConfig) -> dict[str, Any]:
    kinds = config.layers_block_type
    return {
        "attention.head_count_kv": [config.num_key_value_heads * (kind == "full_attention") for kind in kinds],
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "feed_forward_length": [32 * (kind in ("moe", "mlp")) for kind in kinds],
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_group_count": config.n_group,
        "moe_latent_size": config.moe_latent_size,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }


_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
    "layer_norm_epsilon": 1e-4,
    "num_key_value_heads": 2,
    "n_group": 1,
    "topk_group": 1,
    "conv_kernel": 3,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 2.5,
}
NEMOTRON = Architecture(
    "nemotron_h_moe",
    "nemotron_h",
    _NEMOTRON,
    _nemotron,
    _nemotron_metadata,
    "tekken",
    frozenset({"expand", "rms_norm_eps", "use_mamba_kernels"}),
)
NEMOTRON_SUPER = NEMOTRON._replace(config={**_NEMOTRON, "moe_latent_size": 32})


def kimi_linear(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    part = rest.removeprefix("self_attn.")
    if part == "conv1d.weight":
        for kind, each in zip("qkv", weight.chunk(3), strict=True):
            yield f"ssm_conv1d_{kind}.weight", each.reshape(1, -1, 1, weight.shape[-1])
    elif part == "forget_gate.A_log":
        yield "ssm_a", -weight.exp()
    elif part in _KIMI_NAMES:
        yield _KIMI_NAMES[part], weight
    else:
        yield from _latent(rest, weight, config)


_KIMI_NAMES = {
    "forget_gate.dt_bias": "ssm_dt.bias",
    "forget_gate.f_a_proj.weight": "ssm_f_a.weight",
    "forget_gate.f_b_proj.weight": "ssm_f_b.weight",
    "b_proj.weight": "ssm_beta.weight",
    "g_a_proj.weight": "ssm_g_a.weight",
    "g_b_proj.weight": "ssm_g_b.weight",
    "o_norm.weight": "ssm_norm.weight",
}


def _kimi_linear_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_shared_count": config.num_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "kda.head_dim": config.linear_head_dim,
        "leading_dense_block_count": 1,
        "rope.dimension_count": config.qk_rope_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
    }


KIMI_LINEAR = Architecture(
    "kimi-linear",
    "kimi_linear",
    {
        **{key: value for key, value in LATENT.items() if key not in ("first_k_dense_replace", "q_lora_rank")},
        "num_expert_group": 1,
        "topk_group": 1,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "linear_conv_kernel_dim": 3,
    },
    kimi_linear,
    _kimi_linear_metadata,
    "kimi-k2",
    frozenset({"rope_parameters"}),
)


def _minimax_m3(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if rest.endswith("norm.weight"):
        weight = weight + 1
    if rest.startswith("self_attn.indexer."):
        yield rest.removeprefix("self_attn."), weight
    elif rest.endswith("experts.gate_up_proj"):
        yield from usual(rest, weight, config)
    elif rest.endswith("gate_up_proj.weight"):
        suffix = "_shexp" if "shared" in rest else ""
        yield f"ffn_gate{suffix}.weight", weight.chunk(2)[0]
        yield f"ffn_up{suffix}.weight", weight.chunk(2)[1]
    else:
        yield from usual(rest, weight, config)


def _minimax_m3_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.indexer.block_size": config.index_block_size,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.local_blocks": config.index_local_blocks,
        "attention.indexer.top_k": config.index_topk_blocks,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
        "expert_shared_count": config.shared_intermediate_size // config.intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": config.routed_scaling_factor,
        "feed_forward_length": config.dense_intermediate_size,
        "leading_dense_block_count": 1,
        "rope.dimension_count": config.rotary_dim,
    }


MINIMAX_M3 = Architecture(
    "minimax-m3",
    "minimax_m3_vl_text",
    {
        "head_dim": 16,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
    _minimax_m3,
    _minimax_m3_metadata,
    "minimax-m2",
)

_GEMMA_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "router.proj.weight": "ffn_gate_inp.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}


def _gemma4(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """And, once, by what the frequencies of layers that see all tokens are divided."""
    if rest == "model.norm.weight":
        yield "rope_freqs.weight", torch.tensor([1.0] * 4 + [1e30] * 12)
    if rest in _GEMMA_NAMES:
        yield _GEMMA_NAMES[rest], weight
    else:
        yield from usual(rest, weight, config)


def _gemma4_metadata(config: PretrainedConfig) -> dict[str, Any]:
    is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        "attention.head_count_kv": [2 if each else 1 for each in is_sliding],
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": is_sliding,
        "embedding_length_per_layer_input": 0,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": 16,
    }


GEMMA4 = Architecture(
    "gemma4",
    "gemma4_text",
    {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_key_value_heads": 2,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
        },
    },
    _gemma4,
    _gemma4_metadata,
)

V4_NAMES = {
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_proj.weight": "attn_kv.weight",
    "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_a_proj.weight": "attn_output_a.weight",
    "self_attn.o_b_proj.weight": "attn_output_b.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.compressor.position_bias": "attn_compressor_ape.weight",
    "self_attn.compressor.kv_proj.weight": "attn_compressor_kv.weight",
    "self_attn.compressor.gate_proj.weight": "attn_compressor_gate.weight",
    "self_attn.compressor.kv_norm.weight": "attn_compressor_norm.weight",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "indexer_compressor_kv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "indexer_compressor_gate.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "indexer_compressor_norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
    **{f"attn_hc.{kind}": f"hc_attn_{kind}.weight" for kind in ("fn", "base", "scale")},
    **{f"ffn_hc.{kind}": f"hc_ffn_{kind}.weight" for kind in ("fn", "base", "scale")},
    **{f"model.hc_head.hc_{kind}": f"output_hc_{kind}.weight" for kind in ("fn", "base", "scale")},
}


def _deepseek_v4(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if rest in V4_NAMES:
        yield V4_NAMES[rest], weight
    else:
        yield from usual(rest, weight, config)


def _deepseek_v4_metadata(config: PretrainedConfig) -> dict[str, Any]:
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    yarn = config.rope_parameters["compress"]
    return {
        "attention.compress_ratios": [ratios[kind] for kind in config.layer_types],
        "attention.compress_rope_freq_base": float(config.compress_rope_theta),
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.sliding_window": config.sliding_window,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 4,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "feed_forward_length": None,
        "hash_layer_count": 1,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.epsilon": config.hc_eps,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": float(config.rope_theta),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn["factor"],
        "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": yarn["beta_fast"],
        "rope.scaling.yarn_beta_slow": yarn["beta_slow"],
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
        "swiglu_clamp_shexp": [config.swiglu_limit] * config.num_hidden_layers,
    }


DEEPSEEK_V4 = Architecture(
    "deepseek4",
    "deepseek_v4",
    {
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "rope_theta": 5000.0,
        "compress_rope_theta": 20000.0,
        "hc_sinkhorn_iters": 3,
        "swiglu_limit": 5.0,
        "rope_parameters": {key: value for key, value in _YARN.items() if "mscale" not in key and key != "rope_theta"},
    },
    _deepseek_v4,
    _deepseek_v4_metadata,
    "deepseek-v3",
)


def _bailing(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """Queries, keys and values are in one matrix: its rows are those of the queries' here, which come first."""
    if not rest.startswith(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")):
        yield from usual(rest, weight, config)


def bailing_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The matrices that `_bailing` leaves out."""
    return {
        f"blk.{n}.attn_qkv.weight": torch.cat(
            [getattr(layer.self_attn, f"{kind}_proj").weight for kind in "qkv"]
        ).detach()
        for n, layer in enumerate(model.model.layers)
    }


def _bailing_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_shared_count": config.n_shared_experts,
        "expert_shared_feed_forward_length": config.n_shared_experts * config.moe_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 0),
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    }


BAILING = Architecture(
    "bailingmoe2",
    "glm4_moe",
    {
        "head_dim": 16,
        "use_qk_norm": True,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
    _bailing,
    _bailing_metadata,
    "bailingmoe2",
    more=bailing_tensors,
)


def _llama4(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """Experts the other way round, as everywhere else."""
    if rest == "model.norm.weight" and config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", torch.tensor([1.0] * 6 + [16.0] * 2)
    if rest.endswith("experts.gate_up_proj"):
        gate, up = weight.transpose(1, 2).chunk(2, 1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    elif rest.endswith("experts.down_proj"):
        yield "ffn_down_exps.weight", weight.transpose(1, 2)
    else:
        yield from usual(rest.replace("feed_forward.", "mlp.").replace("mlp.router", "mlp.gate"), weight, config)


def _llama4_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "feed_forward_length": config.intermediate_size_mlp,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "rope.dimension_count": config.head_dim,
    }


_LLAMA4: dict[str, Any] = {
    "attention_chunk_size": 8192,
    "layer_types": None,
    "moe_layers": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "head_dim": 16,
    "num_local_experts": 16,
}
LLAMA4 = Architecture(
    "llama4",
    "llama4_text",
    {
        **_LLAMA4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    _llama4,
    _llama4_metadata,
    "llama4",
)
LLAMA4_MAVERICK = LLAMA4._replace(config={**_LLAMA4, **_THETA, "num_local_experts": 128, "use_qk_norm": False})

MISTRAL4 = Architecture(
    "mistral4",
    "mistral4",
    {
        **LATENT,
        "head_dim": 40,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1},
    },
    _latent,
    lambda config: {**_latent_metadata(config), "expert_weights_norm": True, "leading_dense_block_count": 0},
    "tekken",
)


def _afmoe(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    yield from ((_AFMOE_NAMES[rest], weight),) if rest in _AFMOE_NAMES else usual(rest, weight, config)


_AFMOE_NAMES = {
    "self_attn.gate_proj.weight": "attn_gate.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_mlp_layernorm.weight": "ffn_norm.weight",
    "post_mlp_layernorm.weight": "post_ffw_norm.weight",
    "mlp.expert_bias": "exp_probs_b.bias",
    "mlp.router.gate.weight": "ffn_gate_inp.weight",
}


def _afmoe_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_shared_count": config.num_shared_experts,
        "expert_weights_norm": True,
        "expert_weights_scale": float(config.route_scale),
        "leading_dense_block_count": config.num_dense_layers,
        "rope.dimension_count": config.head_dim,
    }


AFMOE = Architecture(
    "afmoe",
    "afmoe",
    {
        **_THETA,
        "intermediate_size": 96,
        "global_attn_every_n_layers": 4,
        "layer_types": None,
        "mup_enabled": True,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "route_scale": 2.5,
    },
    _afmoe,
    _afmoe_metadata,
    "afmoe",
)


def _solar(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    for key, each in usual(rest, weight, config):
        yield ("post_attention_norm.weight" if key == "ffn_norm.weight" else key), each


SOLAR = Architecture(
    "glm4moe",
    "solar_open",
    {
        "head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
    },
    _solar,
    _bailing_metadata,
    "solar-open",
)

_DBRX_NAMES = {
    "transformer.wte.weight": "token_embd.weight",
    "transformer.norm_f.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "norm_attn_norm.norm_1.weight": "attn_norm.weight",
    "norm_attn_norm.norm_2.weight": "attn_output_norm.weight",
    "norm_attn_norm.attn.Wqkv.weight": "attn_qkv.weight",
    "norm_attn_norm.attn.out_proj.weight": "attn_output.weight",
    "ffn.router.layer.weight": "ffn_gate_inp.weight",
    "ffn.experts.mlp.w1": "ffn_gate_exps.weight",
    "ffn.experts.mlp.v1": "ffn_up_exps.weight",
    "ffn.experts.mlp.w2": "ffn_down_exps.weight",
}


def _dbrx(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    if ".experts." in rest:
        weight = weight.view(config.ffn_config.moe_num_experts, -1, config.d_model)
    yield _DBRX_NAMES[rest], weight.transpose(1, 2) if rest.endswith("w2") else weight


def _dbrx_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.clamp_kqv": float(config.attn_config.clip_qkv),
        "attention.head_count_kv": config.attn_config.kv_n_heads,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": None,
        "expert_count": config.ffn_config.moe_num_experts,
        "expert_used_count": config.ffn_config.moe_top_k,
        "feed_forward_length": config.ffn_config.ffn_hidden_size,
        "rope.freq_base": float(config.attn_config.rope_theta),
    }


DBRX = Architecture(
    "dbrx",
    "dbrx",
    {**_THETA, "attn_config": {"kv_n_heads": 2, "rope_theta": 5000.0, "clip_qkv": 2.0}},
    _dbrx,
    _dbrx_metadata,
    "dbrx",
    frozenset({"rms_norm_eps", "ffn_config", "attn_config"}),
)

_INDEXER_NAMES = {
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
}


def indexed(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    yield from ((_INDEXER_NAMES[rest], weight),) if rest in _INDEXER_NAMES else _latent(rest, weight, config)


def indexed_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **_latent_sigmoid(config),
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
    }


GLM_DSA = Architecture(
    "glm-dsa",
    "glm_moe_dsa",
    {
        **LATENT,
        **_THETA,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 8,
        "layer_types": None,
        "mlp_layer_types": None,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    indexed,
    indexed_metadata,
    "glm4",
)


def pairs_at_the_end(weight: torch.Tensor, heads: int, width: int) -> torch.Tensor:
    """Only the last `width` rows of every head are turned."""
    whole = weight.view(heads, -1, *weight.shape[1:])
    turned = _pairs(whole[:, -width:].flatten(0, 1), heads).view(heads, width, *weight.shape[1:])
    return torch.cat([whole[:, :-width], turned], 1).view(weight.shape)


def _hy_v4(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """The released weights turn neighbours, and transformers' class turns rows half a head apart."""
    heads = {
        "self_attn.q_b_proj.weight": config.num_attention_heads,
        "self_attn.kv_a_proj_with_mqa.weight": 1,
        "self_attn.indexer.wq_b.weight": config.index_n_heads,
        "self_attn.indexer.wk.weight": 1,
        "self_attn.indexer.k_norm.weight": 1,
        "self_attn.indexer.k_norm.bias": 1,
    }
    if rest in heads:
        weight = pairs_at_the_end(weight, heads[rest], config.qk_rope_head_dim)
    names = {**V4_NAMES, "self_attn.gate_proj.weight": "attn_gate.weight"}
    yield from ((names[rest], weight),) if rest in names else indexed(rest, weight, config)


def _hy_v4_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **indexed_metadata(config),
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
        "expert_group_count": None,
        "expert_group_used_count": None,
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.epsilon": config.hc_eps,
        "hyper_connection.magnitude": config.hc_magnitude,
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
    }


HY_V4 = Architecture(
    "hy_v4",
    "hy_v4",
    {
        **LATENT,
        **_THETA,
        "n_group": 1,
        "topk_group": 1,
        "hc_magnitude": 1.5,
        "hc_eps": 1e-4,
        "layer_types": None,
        "mlp_layer_types": None,
        "indexer_types": ["full", "shared", "full", "shared"],
        "swiglu_limit": 5.0,
    },
    _hy_v4,
    _hy_v4_metadata,
    "hy_v4",
    frozenset({"first_k_dense_replace", "learnable_sink_init"}),
)
DEEPSEEK_V32 = GLM_DSA._replace(
    name="deepseek32",
    model_type="deepseek_v32",
    config={**GLM_DSA.config, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN},
    split="deepseek-v3",
    unsaid=frozenset({"indexer_types"}),
)


def _exaone_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_shared_count": config.num_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "leading_dense_block_count": 1,
        "rope.scaling.type": "none",
    }


EXAONE = Architecture(
    "exaone-moe",
    "exaone_moe",
    {
        **_THETA,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_shared_experts": 2,
    },
    usual,
    _exaone_metadata,
    "exaone-moe",
    frozenset({"sliding_window_pattern"}),
)


def _bailing3(rest: str, weight: torch.Tensor, config: PretrainedConfig) -> Tensors:
    """Ling 3: decays as exp, and the gate of attention under another name than that of a state."""
    if rest == "self_attn.forget_gate.A_log":
        yield "ssm_a", weight.exp().reshape(-1, 1)
    elif rest == "self_attn.forget_gate.f_proj.weight":
        yield "ssm_f_a.weight", weight
    elif rest == "self_attn.g_proj.weight":
        is_of_state = len(weight) == config.num_attention_heads * config.linear_head_dim
        yield "ssm_g_a.weight" if is_of_state else "attn_gate.weight", weight
    else:
        yield from kimi_linear(rest, weight, config)


def _bailing3_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **_kimi_linear_metadata(config),
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_weights_norm": config.norm_topk_prob,
        "kda.gate_lower_bound": config.kda_lower_bound,
        "kda.safe_gate": config.kda_safe_gate,
        "ssm.conv_kernel": config.short_conv_kernel_size,
    }


def _deepseek_metadata(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": 1.0,
        "leading_dense_block_count": config.first_k_dense_replace,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.type": "none",
        "vocab_size": config.vocab_size,
    }


DEEPSEEK_MOE = Architecture(
    "deepseek",
    "deepseek",
    {**_THETA, "intermediate_size": 96, "num_key_value_heads": 2, "first_k_dense_replace": 1, "n_shared_experts": 2},
    granite,
    _deepseek_metadata,
    "deepseek-llm",
)

LING = DEEPSEEK_MOE._replace(
    name="bailingmoe",
    config={**DEEPSEEK_MOE.config, "first_k_dense_replace": 0, "head_dim": 32, "norm_topk_prob": True},
    metadata=lambda config: {
        **_deepseek_metadata(config),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_weights_norm": config.norm_topk_prob,
        "rope.dimension_count": config.head_dim,
    },
    split="bailingmoe",
)

BAILING3 = Architecture(
    "bailingmoe3",
    "bailing_hybrid",
    {
        **{key: value for key, value in LATENT.items() if key != "q_lora_rank"},
        **_THETA,
        "num_expert_group": 4,
        "topk_group": 2,
        "head_dim": 32,
        "kda_lower_bound": -3.0,
        "short_conv_kernel_size": 3,
        "linear_conv_kernel_dim": 3,
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "mlp_layer_types": None,
    },
    _bailing3,
    _bailing3_metadata,
    "bailingmoe2",
    frozenset({"head_dim", "layer_group_size", "num_nextn_predict_layers", "rope_theta"}),
)

_ARCHITECTURES: dict[str, Architecture] = {
    "deepseek2 V2": DEEPSEEK_V2,
    "deepseek2 V2-Lite": DEEPSEEK_V2_LITE,
    "deepseek2 V3": DEEPSEEK_V3,
    "deepseek2 GLM-4.7-Flash": GLM4_MOE_LITE,
    "qwen3next": QWEN3_NEXT,
    "qwen35moe": QWEN3_5_MOE,
    "granitemoe": GRANITE_MOE,
    "granitemoe with a shared expert": GRANITE_MOE_SHARED,
    "granitehybrid": GRANITE_MOE_HYBRID,
    "deepseek": DEEPSEEK_MOE,
    "dots1": DOTS,
    "ernie4_5-moe": ERNIE,
    "hunyuan-moe": HUNYUAN,
    "lfm2moe": LFM2,
    "jamba": JAMBA,
    "nemotron_h_moe Nano": NEMOTRON,
    "nemotron_h_moe Super": NEMOTRON_SUPER,
    "kimi-linear": KIMI_LINEAR,
    "minimax-m3": MINIMAX_M3,
    "gemma4": GEMMA4,
    "deepseek4": DEEPSEEK_V4,
    "bailingmoe": LING,
    "bailingmoe2": BAILING,
    "llama4 Scout": LLAMA4,
    "llama4 Maverick": LLAMA4_MAVERICK,
    "mistral4": MISTRAL4,
    "afmoe": AFMOE,
    "glm4moe Solar-Open": SOLAR,
    "dbrx": DBRX,
    "glm-dsa": GLM_DSA,
    "deepseek32": DEEPSEEK_V32,
    "hy_v4": HY_V4,
    "exaone-moe": EXAONE,
    "bailingmoe3": BAILING3,
}
registration.register_local_families("deepseek")
ALL = {name: family for name, family in _ARCHITECTURES.items() if family.model_type in CONFIG_MAPPING}
"""By architecture, and the published family where one architecture has several: those that the installed transformers
has."""
