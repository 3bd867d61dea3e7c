"""Toy models written as GGUF files, as converters write them.

The library's names are turned into ggml's by hand here, so that a wrong entry in our own translation shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PretrainedConfig, PreTrainedModel

from smoe.formats.registry import FORMATS
from tests import zoo
from tests.formats.blocks import random_rows
from tests.toy import ASCII, END, TEMPLATE

ARCHITECTURES = {
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
SPLITS = {
    "glm4_moe": "glm4",
    "gpt_oss": "gpt-4o",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama-bpe",
    "olmoe": "olmo",
}
"""How a family's tokenizer splits texts, where not as qwen2's."""
TOKENS = [*ASCII, END, "<|im_start|>", "<|im_end|>", "~~"]
NORMAL, CONTROL = 1, 3

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 64,
}
_ODDITIES: dict[str, dict[str, Any]] = {
    "minimax_m2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    },
}
"""What the published models of a family have, and its toys do not."""
MIXTURES = {
    "Q8_0": [("Q8_0", "Q8_0")],
    "Q4_0": [("Q4_0", "Q4_0")],
    "Q5_1": [("Q5_1", "Q5_0")],
    "Q4_K_M": [("Q4_K", "Q6_K"), ("Q4_K", "Q4_K")],
    "Q3_K_M": [("Q3_K", "Q5_K"), ("Q2_K", "Q4_K")],
    "MXFP4": [("MXFP4", "MXFP4"), ("Q4_1", "Q8_0")],
    "IQ4_XS": [("IQ4_XS", "IQ4_XS"), ("IQ4_NL", "Q5_K")],
    "IQ3_M": [("IQ3_XXS", "IQ3_S"), ("IQ3_S", "Q4_K")],
    "IQ2_M": [("IQ2_S", "IQ3_XXS"), ("IQ2_XXS", "IQ2_XS")],
    "IQ1_M": [("IQ1_S", "IQ1_M"), ("IQ1_M", "TQ2_0")],
}
DENSE = {
    "IQ4_XS": ("IQ4_XS", "IQ4_NL"),
    "IQ3_M": ("IQ3_S", "IQ4_NL"),
    "IQ2_M": ("IQ2_S", "IQ4_NL"),
    "IQ1_M": ("TQ2_0", "IQ4_NL"),
}
"""Formats of the other matrices, where not Q8_0: of each the first whose blocks its rows are made of."""

_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ALONE = {"self_attn.sinks": "attn_sinks.weight"}
_IN_FAMILY = {family: {"post_attention_layernorm": "post_attention_norm"} for family in ("glm4_moe", "gpt_oss")}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make(family: str, **more: Any) -> PreTrainedModel:
    """A toy, as odd as its family's published models."""
    return zoo.make(family, **{**_ODDITIES.get(family, {}), **more})


def tensors_of(model: PreTrainedModel, *, fused: bool = False) -> dict[str, torch.Tensor]:
    """A toy's weights by ggml's names, as views; the experts' stacked [E, N, K]; `fused`: gate and up in one tensor."""
    found: dict[str, torch.Tensor] = {}
    kept = model.state_dict().keys()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        weight = parameter.detach()
        if name not in kept:
            continue
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            stem, _, suffix = name.rpartition(".")
            found[f"{_GLOBAL[stem]}.{suffix}"] = weight
            continue
        block, rest = f"blk.{layer[1]}", layer[2]
        if ".experts." in rest:
            part = rest.rpartition(".")[2]
            split = _in_turns if model.config.model_type == "gpt_oss" else _fused if fused else _one_below_the_other
            found |= {f"{block}.ffn_{kind}_exps.{suffix}": each for kind, suffix, each in split(part, weight)}
        elif rest in _ALONE or rest.endswith("e_score_correction_bias"):
            found[f"{block}.{_ALONE.get(rest, 'exp_probs_b.bias')}"] = weight
        else:
            stem, _, suffix = rest.rpartition(".")
            if model.config.model_type == "mixtral":
                weight = _in_pairs(stem, weight, model.config)
            ggml = _IN_FAMILY.get(model.config.model_type, {}).get(stem) or _IN_LAYER[stem]
            found[f"{block}.{ggml}.{suffix}"] = weight[0] if stem == "mlp.shared_expert_gate" else weight
    return found


def _in_pairs(stem: str, weight: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Rows of a query or key matrix that are turned together next to each other: [heads, pairs, 2, columns]."""
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    return weight.unflatten(0, (heads[stem], 2, -1)).transpose(1, 2) if stem in heads else weight


def _fused(part: str, weight: torch.Tensor) -> list[tuple[str, str, torch.Tensor]]:
    return [({"gate_up_proj": "gate_up", "down_proj": "down"}[part], "weight", weight)]


def _one_below_the_other(part: str, weight: torch.Tensor) -> list[tuple[str, str, torch.Tensor]]:
    if part == "down_proj":
        return [("down", "weight", weight)]
    gate, up = weight.chunk(2, 1)
    return [("gate", "weight", gate), ("up", "weight", up)]


def _in_turns(part: str, weight: torch.Tensor) -> list[tuple[str, str, torch.Tensor]]:
    """gpt_oss: inputs by outputs, of which every second is the up's."""
    suffix = "bias" if part.endswith("_bias") else "weight"
    rows = weight if suffix == "bias" else weight.transpose(1, 2)
    if part.startswith("down"):
        return [("down", suffix, rows)]
    return [("gate", suffix, rows[:, ::2]), ("up", suffix, rows[:, 1::2])]


@torch.no_grad()
def take_weights(model: PreTrainedModel, path: Path) -> None:
    """Give `model` the weights of a file that was written of it, dequantised and each rounded once to its type."""
    stored = dequantised(path)
    for name, weight in tensors_of(model).items():
        weight.copy_(stored[name].view(weight.shape))


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """What a converter says of a toy's sizes, by the key without the architecture."""
    config = model.config
    said = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_used_count": config.num_experts_per_tok,
    }
    return said | _METADATA[config.model_type](config)


def _glm4_moe(config: PretrainedConfig) -> dict[str, Any]:
    """With a layer that guesses the token after the next, as published: it counts as a layer."""
    return {
        "block_count": config.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "expert_count": config.n_routed_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
    }


def _minimax_m2(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
    }


def _olmoe(config: PretrainedConfig) -> dict[str, Any]:
    return {"expert_count": config.num_experts}


def _gpt_oss(config: PretrainedConfig) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "expert_count": config.num_local_experts,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


def _qwen2_moe(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def _qwen3_moe(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }


def _mixtral(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "expert_count": config.num_local_experts,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }


_METADATA = {
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}


def write(
    path: Path,
    model: PreTrainedModel,
    *,
    experts: Type = Type.BF16,
    dense: Type = Type.BF16,
    fused: bool = False,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
    parts: int = 1,
    architecture: str | None = None,
    more: Mapping[str, Any] | None = None,
    split: str | None = "usual",
    blocks: Mapping[str, tuple[np.ndarray, Type]] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a toy to `path`, or to several parts named after it; returns the (first) file.

    Matrices are stored as `experts` or `dense` say, vectors as F32, as converters do. `metadata` and `tensors` change
    what is written, None leaves an entry out; `more` are metadata entries by their full keys, `split` is
    how the tokenizer splits texts (not said: as the family does). `blocks` are bytes that take a tensor's place as
    they are; `tokenizer` adds another one than the usual.
    """
    return write_file(
        path,
        architecture or ARCHITECTURES[model.config.model_type],
        {**metadata_of(model), **(metadata or {})},
        {**tensors_of(model, fused=fused), **(tensors or {})},
        experts=experts,
        dense=dense,
        parts=parts,
        more=more,
        split=SPLITS.get(model.config.model_type, "qwen2") if split == "usual" else split,
        blocks=blocks,
        tokenizer=tokenizer,
    )


def write_file(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor | None],
    *,
    experts: Type = Type.BF16,
    dense: Type = Type.BF16,
    parts: int = 1,
    more: Mapping[str, Any] | None = None,
    split: str | None = "qwen2",
    blocks: Mapping[str, tuple[np.ndarray, Type]] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    wide: str = "$^",
) -> Path:
    """The same of metadata by the keys without the architecture, and of tensors by ggml's names; rows that are no whole
    blocks of their type are stored as F32, and so is what has the regular expression `wide` in its name."""
    most = -(-len(tensors) // parts) + 1 if parts > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most)
    for key, value in metadata.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    if tokenizer is not None:
        tokenizer(writer)
    else:
        _add_tokenizer(writer, split)
    for key, value in (more or {}).items():
        _add(writer, key, value)
    for key, weight in tensors.items():
        if blocks is not None and key in blocks:
            writer.add_tensor(key, blocks[key][0], raw_dtype=blocks[key][1])
        elif weight is not None and not weight.is_floating_point():
            writer.add_tensor(key, weight.int().numpy())
        elif weight is not None:
            is_vector = weight.dim() == 1 or key.endswith("bias") or re.search(wide, key)
            kind = Type.F32 if is_vector else experts if "_exps." in key else dense
            kind = Type.F32 if weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind
            rows = weight.flatten(0, 2) if weight.dim() == 4 else weight
            data = gguf.quants.quantize(rows.detach().float().numpy(), kind)
            data = data.reshape(weight.shape) if "ssm_conv1d_" in key else data  # has four dimensions in files
            writer.add_tensor(key, data, raw_dtype=None if kind in (Type.F32, Type.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))


def dequantised(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of one file in fp32, by the gguf package's own reader."""
    reader = gguf.GGUFReader(path)
    return {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in reader.tensors
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[..., None]]
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    if re.search(r"\.ple\.(head|layer)_", key):  # numbers of a hash function, which have up to 64 bits
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT64)
    else:
        kinds[type(value)](key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, split: str | None) -> None:
    writer.add_tokenizer_model("gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([NORMAL] * len(ASCII) + [CONTROL] * 3 + [NORMAL])
    writer.add_token_merges(["~ ~"])
    writer.add_eos_token_id(len(ASCII))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def quantised(
    path: Path,
    mixture: str,
    family: str = "qwen3_moe",
    dtype: torch.dtype = torch.bfloat16,
    is_tied: bool = False,
    **more: Any,
) -> tuple[Path, PreTrainedModel]:
    """A toy file whose experts are random blocks, of formats that alternate between layers, and the library's model."""
    model = make(family, dtype=dtype, tie_word_embeddings=is_tied, **SIZES, **more)
    blocks = {}
    weights = tensors_of(model)
    for layer, (up, down) in zip(range(model.config.num_hidden_layers), cycle(MIXTURES[mixture]), strict=False):
        for n, (kind, name) in enumerate((("gate", up), ("up", up), ("down", down))):
            key = f"blk.{layer}.ffn_{kind}_exps.weight"
            if key in weights:
                experts, rows, columns = weights[key].shape
                data = random_rows(FORMATS[name], experts * rows, columns, 10 * layer + n, spread=0.004)
                blocks[key] = data.reshape(experts, rows, -1), Type[name]
    for n, (key, weight) in enumerate(weights.items()):
        is_routed = "_exps." in key or "gate_inp" in key
        if mixture in DENSE and weight.dim() == 2 and not is_routed:
            form = next(FORMATS[name] for name in DENSE[mixture] if FORMATS[name].fits(weight.shape[1]))
            blocks[key] = random_rows(form, *weight.shape, 1000 + n, spread=0.004), Type[form.name]
    write(path, model, blocks=blocks, dense=Type.Q8_0)
    take_weights(model, path)
    return path, model
