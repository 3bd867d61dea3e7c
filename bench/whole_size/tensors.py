"""The tensors and metadata of a file, by architecture, as llama.cpp's converter writes them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bench.whole_size.geometry import Geometry


class Kind(enum.Enum):
    """The contents of a tensor."""

    MATRIX = enum.auto()
    BRANCH = enum.auto()
    """A matrix whose product is added to the hidden state."""
    EMBEDDING = enum.auto()
    OUTPUT = enum.auto()
    ROUTER = enum.auto()
    ROUTER_NORM = enum.auto()
    """The norm before a router."""
    ONES = enum.auto()
    ZEROS = enum.auto()
    DECAY = enum.auto()
    """The decay of a recurrent state."""


class Tensor(NamedTuple):
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """The last number is the length of a row."""
    kind: Kind = Kind.MATRIX


Tensors = Iterator[Tensor]


def tensors_of(g: Geometry) -> list[Tensor]:
    """Return all tensors of a model, layer by layer."""
    found = [
        Tensor("token_embd.weight", (g.vocabulary, g.hidden), Kind.EMBEDDING),
        Tensor("output_norm.weight", (g.hidden,), Kind.ONES),
        Tensor("output.weight", (g.vocabulary, g.hidden), Kind.OUTPUT),
    ]
    for layer in range(g.layers):
        for tensor in _ARCHITECTURES[g.architecture].layer(g, layer):
            found.append(tensor._replace(name=f"blk.{layer}.{tensor.name}"))
    return found


def metadata_of(g: Geometry) -> dict[str, Any]:
    """Return the metadata of the model, by keys without the architecture."""
    found = {
        "block_count": g.layers,
        "context_length": g.context_tokens,
        "embedding_length": g.hidden,
        "attention.head_count": g.heads,
        "attention.head_count_kv": g.key_value_heads,
        "attention.layer_norm_rms_epsilon": g.epsilon,
        "attention.key_length": g.head_dim,
        "attention.value_length": g.head_dim,
        "rope.freq_base": float(g.rope_base),
        "expert_count": g.experts,
        "expert_used_count": g.top_k,
        "expert_feed_forward_length": g.inner,
    }
    if g.dense_inner:
        found["feed_forward_length"] = g.dense_inner
    return found | _ARCHITECTURES[g.architecture].metadata(g)


def _norm(name: str, size: int, kind: Kind = Kind.ONES) -> Tensors:
    yield Tensor(f"{name}.weight", (size,), kind)


def _block_norm(name: str, g: Geometry, layer: int) -> Tensors:
    """Yield the norm after attention."""
    yield from _norm(name, g.hidden, Kind.ROUTER_NORM if layer in g.sparse_layers else Kind.ONES)


def _matrix(name: str, *shape: int, bias: bool = False, kind: Kind = Kind.MATRIX) -> Tensors:
    yield Tensor(f"{name}.weight", shape, kind)
    if bias:
        yield Tensor(f"{name}.bias", shape[:-1], Kind.ZEROS)


def _attention(g: Geometry, bias: bool = False, output_bias: bool = False, gates: int = 1) -> Tensors:
    """Yield the projections of full attention; with `gates` 2, every query has a gate."""
    yield from _matrix("attn_q", gates * g.heads * g.head_dim, g.hidden, bias=bias)
    yield from _matrix("attn_k", g.key_value_heads * g.head_dim, g.hidden, bias=bias)
    yield from _matrix("attn_v", g.key_value_heads * g.head_dim, g.hidden, bias=bias)
    yield from _matrix("attn_output", g.hidden, g.heads * g.head_dim, bias=output_bias, kind=Kind.BRANCH)


def _head_norms(g: Geometry) -> Tensors:
    yield from _norm("attn_q_norm", g.head_dim)
    yield from _norm("attn_k_norm", g.head_dim)


def _feed_forward(g: Geometry, inner: int, suffix: str, *experts: int, bias: bool = False) -> Tensors:
    yield from _matrix(f"ffn_gate{suffix}", *experts, inner, g.hidden, bias=bias)
    yield from _matrix(f"ffn_up{suffix}", *experts, inner, g.hidden, bias=bias)
    yield from _matrix(f"ffn_down{suffix}", *experts, g.hidden, inner, bias=bias, kind=Kind.BRANCH)


def _experts(g: Geometry, bias: bool = False) -> Tensors:
    yield from _matrix("ffn_gate_inp", g.experts, g.hidden, bias=bias, kind=Kind.ROUTER)
    yield from _feed_forward(g, g.inner, "_exps", g.experts, bias=bias)


def _dense_or_experts(g: Geometry, layer: int) -> Tensors:
    """Yield the matrices of a dense layer, or routed and shared experts."""
    if layer < g.dense_layers:
        yield from _feed_forward(g, g.dense_inner, "")
    else:
        yield from _experts(g)
        yield from _feed_forward(g, g.shared_inner, "_shexp")


def _qwen3moe(g: Geometry, layer: int) -> Tensors:
    yield from _norm("attn_norm", g.hidden)
    yield from _attention(g)
    yield from _head_norms(g)
    yield from _block_norm("ffn_norm", g, layer)
    yield from _experts(g)


def _qwen35moe(g: Geometry, layer: int) -> Tensors:
    yield from _norm("attn_norm", g.hidden)
    if g.has_full_attention(layer):
        yield from _attention(g, gates=2)
        yield from _head_norms(g)
    else:
        yield from _linear_attention(g)
    yield from _block_norm("post_attention_norm", g, layer)
    yield from _experts(g)
    yield Tensor("ffn_gate_inp_shexp.weight", (g.hidden,), Kind.ZEROS)
    yield from _feed_forward(g, g.shared_inner, "_shexp")


def _linear_attention(g: Geometry) -> Tensors:
    assert g.linear is not None, g.architecture
    linear, together = g.linear, 2 * g.linear.keys + g.linear.values
    yield from _matrix("attn_qkv", together, g.hidden)
    yield from _matrix("attn_gate", linear.values, g.hidden)
    yield from _matrix("ssm_conv1d", together, linear.kernel)
    yield Tensor("ssm_dt.bias", (linear.value_heads,), Kind.ZEROS)
    yield Tensor("ssm_a", (linear.value_heads,), Kind.DECAY)
    yield from _matrix("ssm_beta", linear.value_heads, g.hidden)
    yield from _matrix("ssm_alpha", linear.value_heads, g.hidden)
    yield from _norm("ssm_norm", linear.head_dim)
    yield from _matrix("ssm_out", g.hidden, linear.values, kind=Kind.BRANCH)


def _gpt_oss(g: Geometry, layer: int) -> Tensors:
    yield from _norm("attn_norm", g.hidden)
    yield from _attention(g, bias=True, output_bias=True)
    yield Tensor("attn_sinks.weight", (g.heads,), Kind.ZEROS)
    yield from _block_norm("post_attention_norm", g, layer)
    yield from _experts(g, bias=True)


def _deepseek2(g: Geometry, layer: int) -> Tensors:
    assert g.latent is not None, g.architecture
    rank, plain, rotated, values = g.latent
    yield from _norm("attn_norm", g.hidden)
    yield from _matrix("attn_q", g.heads * (plain + rotated), g.hidden)
    yield from _matrix("attn_kv_a_mqa", rank + rotated, g.hidden)
    yield from _norm("attn_kv_a_norm", rank)
    yield from _matrix("attn_k_b", g.heads, rank, plain)
    yield from _matrix("attn_v_b", g.heads, values, rank)
    yield from _matrix("attn_output", g.hidden, g.heads * values, kind=Kind.BRANCH)
    yield from _block_norm("ffn_norm", g, layer)
    yield from _dense_or_experts(g, layer)


def _glm4moe(g: Geometry, layer: int) -> Tensors:
    yield from _norm("attn_norm", g.hidden)
    yield from _attention(g, bias=True)
    yield from _block_norm("post_attention_norm", g, layer)
    yield from _dense_or_experts(g, layer)
    if layer >= g.dense_layers:
        yield Tensor("exp_probs_b.bias", (g.experts,), Kind.ZEROS)


def _no_metadata(g: Geometry) -> dict[str, Any]:
    return {}


def _qwen35moe_metadata(g: Geometry) -> dict[str, Any]:
    assert g.linear is not None, g.architecture
    pairs = g.head_dim // 8  # a quarter of a head is rotated
    third = -(-pairs // 3)
    return {
        "expert_shared_feed_forward_length": g.shared_inner,
        "rope.dimension_count": 2 * pairs,
        "rope.dimension_sections": [third, third, pairs - 2 * third, 0],
        "ssm.conv_kernel": g.linear.kernel,
        "ssm.state_size": g.linear.head_dim,
        "ssm.group_count": g.linear.key_heads,
        "ssm.time_step_rank": g.linear.value_heads,
        "ssm.inner_size": g.linear.values,
        "full_attention_interval": g.linear.full_every,
    }


def _gpt_oss_metadata(g: Geometry) -> dict[str, Any]:
    return {
        "attention.sliding_window": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }


def _deepseek2_metadata(g: Geometry) -> dict[str, Any]:
    assert g.latent is not None, g.architecture
    rank, plain, rotated, values = g.latent
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": plain + rotated,
        "attention.value_length_mla": values,
        "attention.kv_lora_rank": rank,
        "expert_shared_count": g.shared_inner // g.inner,
        "expert_weights_scale": 1.0,
        "leading_dense_block_count": g.dense_layers,
        "rope.dimension_count": rotated,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.1 * 0.707,
        "vocab_size": g.vocabulary,
    }


def _glm4moe_metadata(g: Geometry) -> dict[str, Any]:
    return {
        "rope.dimension_count": g.head_dim // 2,
        "expert_shared_count": g.shared_inner // g.inner,
        "leading_dense_block_count": g.dense_layers,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
    }


class _Architecture(NamedTuple):
    layer: Callable[[Geometry, int], Tensors]
    metadata: Callable[[Geometry], dict[str, Any]] = _no_metadata


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "qwen3moe": _Architecture(_qwen3moe),
    "qwen35moe": _Architecture(_qwen35moe, _qwen35moe_metadata),
    "gpt-oss": _Architecture(_gpt_oss, _gpt_oss_metadata),
    "deepseek2": _Architecture(_deepseek2, _deepseek2_metadata),
    "glm4moe": _Architecture(_glm4moe, _glm4moe_metadata),
}
