"""The weights of one layer, and the cache sizes, of every family in `families.py`.

A function named like a family yields the (name, `Weight`) pairs of layer number `layer` with the name prefix `name`.
`c` is the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smoe.models.family_parts import (
    Weights,
    experts,
    gated,
    head_dim,
    head_norms,
    heads,
    latent,
    linear,
    norm,
    norms,
    router,
    whole_norms,
)
from smoe.models.outline import Weight
from smoe.models.plain_config import PlainConfig, UndescribedError


def mixtral(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c)
    yield from router(f"{name}.mlp.gate", c, c.num_local_experts)
    yield from experts(f"{name}.mlp", c, c.num_local_experts, c.intermediate_size)
    yield from norms(name, c)


def phimoe(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c, c.attention_bias, c.attention_bias)
    yield f"{name}.mlp.router.weight", Weight((c.num_local_experts, c.hidden_size), is_linear=True)
    yield from experts(f"{name}.mlp", c, c.num_local_experts, c.intermediate_size)
    yield from norms(name, c, bias=True)


def minimax_m2(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from mixtral(name, c, layer)
    yield from whole_norms(f"{name}.self_attn", c)


def olmoe(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c, c.attention_bias, c.attention_bias)
    yield from whole_norms(f"{name}.self_attn", c)
    yield from router(f"{name}.mlp.gate", c, c.num_experts)
    yield from experts(f"{name}.mlp", c, c.num_experts, c.intermediate_size)
    yield from norms(name, c)


def granitemoe(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c, c.attention_bias, c.attention_bias)
    yield from router(f"{name}.block_sparse_moe.router", c, c.num_local_experts)
    yield from experts(f"{name}.block_sparse_moe", c, c.num_local_experts, c.intermediate_size)
    yield from norms(name, c)


def gpt_oss(name: str, c: PlainConfig, layer: int) -> Weights:
    count, inner, block = c.num_local_experts, c.intermediate_size, f"{name}.mlp"
    yield from heads(f"{name}.self_attn", c, c.attention_bias, c.attention_bias)
    yield f"{name}.self_attn.sinks", Weight((c.num_attention_heads,))
    yield from router(f"{block}.router", c, count)
    yield f"{block}.router.bias", Weight((count,))
    yield f"{block}.experts.gate_up_proj", Weight((count, c.hidden_size, 2 * inner))
    yield f"{block}.experts.gate_up_proj_bias", Weight((count, 2 * inner))
    yield f"{block}.experts.down_proj", Weight((count, inner, c.hidden_size))
    yield f"{block}.experts.down_proj_bias", Weight((count, c.hidden_size))
    yield from norms(name, c)


def _qwen_block(name: str, c: PlainConfig, layer: int, has_shared: bool) -> Weights:
    """Yield the feed-forward weights of a Qwen layer: experts in every `decoder_sparse_step`-th layer, else dense."""
    if not c.num_experts or layer in (c.mlp_only_layers or ()) or (layer + 1) % c.decoder_sparse_step:
        yield from gated(f"{name}.mlp", c, c.intermediate_size)
        return
    yield from router(f"{name}.mlp.gate", c, c.num_experts)
    yield from experts(f"{name}.mlp", c, c.num_experts, c.moe_intermediate_size)
    if has_shared:
        yield from gated(f"{name}.mlp.shared_expert", c, c.shared_expert_intermediate_size)
        yield from linear(f"{name}.mlp.shared_expert_gate", 1, c.hidden_size)


def qwen2_moe(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c, c.qkv_bias)
    yield from _qwen_block(name, c, layer, has_shared=True)
    yield from norms(name, c)


def qwen3_moe(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c, c.attention_bias, c.attention_bias)
    yield from head_norms(f"{name}.self_attn", c)
    yield from _qwen_block(name, c, layer, has_shared=False)
    yield from norms(name, c)


def qwen3_next(name: str, c: PlainConfig, layer: int) -> Weights:
    keys, values = _linear_widths(c)
    widths = {"qkvz": 2 * keys + 2 * values, "ba": 2 * c.linear_num_value_heads}
    yield from _full_or_linear(name, c, layer, widths)
    yield from _qwen_block(name, c, layer, has_shared=True)
    yield from norms(name, c)


def qwen3_5(name: str, c: PlainConfig, layer: int) -> Weights:
    keys, values = _linear_widths(c)
    widths = {"qkv": 2 * keys + values, "z": values, "b": c.linear_num_value_heads, "a": c.linear_num_value_heads}
    yield from _full_or_linear(name, c, layer, widths)
    yield from router(f"{name}.mlp.gate", c, c.num_experts)
    yield from experts(f"{name}.mlp", c, c.num_experts, c.moe_intermediate_size)
    yield from gated(f"{name}.mlp.shared_expert", c, c.shared_expert_intermediate_size)
    yield from linear(f"{name}.mlp.shared_expert_gate", 1, c.hidden_size)
    yield from norms(name, c)


def _full_or_linear(name: str, c: PlainConfig, layer: int, widths: Mapping[str, int]) -> Weights:
    """Yield the weights of a layer's attention: full attention whose queries have gates, or linear attention. `widths`:
    the output widths of linear attention's input projections, by name."""
    if _kinds(c)[layer] == "full_attention":
        yield from heads(f"{name}.self_attn", c, c.attention_bias, c.attention_bias, gates=2)
        yield from head_norms(f"{name}.self_attn", c)
        return
    block, (keys, values) = f"{name}.linear_attn", _linear_widths(c)
    yield f"{block}.dt_bias", Weight((c.linear_num_value_heads,))
    yield f"{block}.A_log", Weight((c.linear_num_value_heads,))
    yield f"{block}.conv1d.weight", Weight((2 * keys + values, 1, c.linear_conv_kernel_dim))
    for what, width in widths.items():
        yield from linear(f"{block}.in_proj_{what}", width, c.hidden_size)
    yield from norm(f"{block}.norm", c.linear_value_head_dim)
    yield from linear(f"{block}.out_proj", c.hidden_size, values)


def _linear_widths(c: PlainConfig) -> tuple[int, int]:
    """Return (width of the keys, width of the values) of linear attention, summed over all heads."""
    return c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim


def _deepseek_block(name: str, c: PlainConfig, layer: int, shared: int | None, is_sparse: bool) -> Weights:
    """Yield the feed-forward weights of a DeepSeek layer: dense, or routed experts with optional shared experts."""
    if not is_sparse:
        yield from gated(f"{name}.mlp", c, c.intermediate_size)
        return
    yield from router(f"{name}.mlp.gate", c, c.n_routed_experts)
    yield from experts(f"{name}.mlp", c, c.n_routed_experts, c.moe_intermediate_size)
    if shared:
        yield from gated(f"{name}.mlp.shared_experts", c, shared * c.moe_intermediate_size)


def deepseek_v3(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from latent(f"{name}.self_attn", c)
    yield from _deepseek_block(name, c, layer, c.n_shared_experts, layer >= c.first_k_dense_replace)
    yield from norms(name, c)


def deepseek_v32(name: str, c: PlainConfig, layer: int) -> Weights:
    indexer = f"{name}.self_attn.indexer"
    yield from latent(f"{name}.self_attn", c)
    if _indexers(c)[layer] == "full":
        yield from linear(f"{indexer}.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield from linear(f"{indexer}.wk", c.index_head_dim, c.hidden_size)
        yield from norm(f"{indexer}.k_norm", c.index_head_dim, bias=True)
        yield from linear(f"{indexer}.weights_proj", c.index_n_heads, c.hidden_size)
    yield from _deepseek_block(name, c, layer, c.n_shared_experts, _is_sparse(c, layer, c.first_k_dense_replace))
    yield from norms(name, c)


def _indexers(c: PlainConfig) -> Sequence[str]:
    """Return, for each layer, whether it has an indexer of its own (`full`) or uses the previous layer's selection of
    positions (`shared`). transformers' deepseek_v32 gives every layer an indexer, whatever the configuration says."""
    own = ["full"] * c.num_hidden_layers
    return own if c.model_type == "deepseek_v32" else _each_of(c, "indexer_types", ("full", "shared")) or own


def glm4_moe_lite(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from latent(f"{name}.self_attn", c)
    yield from _deepseek_block(name, c, layer, c.n_shared_experts, _is_sparse(c, layer, 1))
    yield from norms(name, c)


def _is_sparse(c: PlainConfig, layer: int, dense_layers: int) -> bool:
    """Return whether a layer has experts. If the configuration has no list of layer types, all layers except the first
    `dense_layers` have experts."""
    kinds = _each_of(c, "mlp_layer_types", ("dense", "sparse"))
    return kinds[layer] == "sparse" if kinds else layer >= dense_layers


def _each_of(c: PlainConfig, field: str, known: Sequence[str]) -> Sequence[str]:
    """Return the value of a field that has one of the `known` words for each layer; empty if the field is missing."""
    words: Sequence[str] = getattr(c, field)
    if words and (len(words) != c.num_hidden_layers or not set(known).issuperset(words)):
        raise UndescribedError(f"{field} {words!r:.80}")
    return words


def solar_open(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c, c.attention_bias)
    yield from _deepseek_block(name, c, layer, c.n_shared_experts, is_sparse=True)
    yield from norms(name, c)


def exaone_moe(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c)
    yield from head_norms(f"{name}.self_attn", c)
    if _is_sparse(c, layer, c.first_k_dense_replace):
        yield from router(f"{name}.mlp.gate", c, c.num_experts)
        yield from experts(f"{name}.mlp", c, c.num_experts, c.moe_intermediate_size)
        yield from gated(f"{name}.mlp.shared_experts", c, c.num_shared_experts * c.moe_intermediate_size)
    else:
        yield from gated(f"{name}.mlp", c, c.intermediate_size)
    yield from norms(name, c)


def llama4(name: str, c: PlainConfig, layer: int) -> Weights:
    block, count, inner = f"{name}.feed_forward", c.num_local_experts, c.intermediate_size
    yield from heads(f"{name}.self_attn", c, c.attention_bias, c.attention_bias)
    if layer in c.moe_layers if c.moe_layers else (layer + 1) % c.interleave_moe_layer_step == 0:
        yield f"{block}.experts.gate_up_proj", Weight((count, c.hidden_size, 2 * inner))
        yield f"{block}.experts.down_proj", Weight((count, inner, c.hidden_size))
        yield f"{block}.router.weight", Weight((count, c.hidden_size), is_linear=True)
        yield from gated(f"{block}.shared_expert", c, inner)
    else:
        yield from gated(block, c, c.intermediate_size_mlp)
    yield from norms(name, c)


def deepseek(name: str, c: PlainConfig, layer: int) -> Weights:
    is_sparse = layer >= c.first_k_dense_replace and layer % c.moe_layer_freq == 0
    yield from heads(f"{name}.self_attn", c)
    yield from _deepseek_block(name, c, layer, c.n_shared_experts, is_sparse)
    yield from norms(name, c)


def dots1(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c, c.attention_bias, c.attention_bias)
    yield from head_norms(f"{name}.self_attn", c)
    yield from _deepseek_block(name, c, layer, c.n_shared_experts, layer >= c.first_k_dense_replace)
    yield from norms(name, c)


def glm4_moe(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c, c.attention_bias)
    if c.use_qk_norm:
        yield from head_norms(f"{name}.self_attn", c)
    yield from _deepseek_block(name, c, layer, c.n_shared_experts, layer >= c.first_k_dense_replace)
    yield from norms(name, c)


def xverse(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c)
    yield from router(f"{name}.mlp.router", c, c.num_experts, is_wide=True)
    yield from experts(f"{name}.mlp", c, c.num_experts, c.intermediate_size)
    if c.num_shared_experts:
        yield from gated(f"{name}.mlp.shared_experts", c, c.num_shared_experts * c.intermediate_size)
    yield from norms(name, c)


def ernie(name: str, c: PlainConfig, layer: int) -> Weights:
    last = c.num_hidden_layers - 1 if c.moe_layer_end_index == -1 else c.moe_layer_end_index
    yield from heads(f"{name}.self_attn", c, c.use_bias, c.use_bias)
    if (layer + 1) % c.moe_layer_interval or not c.moe_layer_start_index <= layer <= last:
        yield from gated(f"{name}.mlp", c, c.intermediate_size, c.use_bias)
    else:
        yield from router(f"{name}.mlp.gate", c, c.moe_num_experts, is_wide=True)
        yield f"{name}.mlp.gate.moe_statics.e_score_correction_bias", Weight((1, c.moe_num_experts), is_wide=True)
        yield from experts(f"{name}.mlp", c, c.moe_num_experts, c.moe_intermediate_size)
        if c.moe_num_shared_experts:
            shared = c.moe_num_shared_experts * c.moe_intermediate_size
            yield from gated(f"{name}.mlp.shared_experts", c, shared, c.use_bias)
    yield from norms(name, c)


def hunyuan(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from heads(f"{name}.self_attn", c, c.attention_bias, c.attention_bias)
    yield from head_norms(f"{name}.self_attn", c, "query_layernorm", "key_layernorm")
    yield f"{name}.mlp.gate.wg.weight", Weight((c.num_experts, c.hidden_size), True, True, is_wide=True)
    yield from experts(f"{name}.mlp", c, c.num_experts, c.intermediate_size)
    yield from gated(f"{name}.mlp.shared_mlp", c, c.intermediate_size)
    yield from norms(name, c)


def lfm2_moe(name: str, c: PlainConfig, layer: int) -> Weights:
    hidden, block = c.hidden_size, f"{name}.feed_forward"
    if _kinds(c)[layer] == "full_attention":
        yield from heads(f"{name}.self_attn", c, output="out_proj")
        yield from head_norms(f"{name}.self_attn", c, "q_layernorm", "k_layernorm")
    else:
        yield f"{name}.conv.conv.weight", Weight((hidden, 1, c.conv_L_cache))
        yield from linear(f"{name}.conv.in_proj", 3 * hidden, hidden)
        yield from linear(f"{name}.conv.out_proj", hidden, hidden)
    if layer < c.num_dense_layers:
        yield from linear(f"{block}.w1", c.intermediate_size, hidden)
        yield from linear(f"{block}.w3", c.intermediate_size, hidden)
        yield from linear(f"{block}.w2", hidden, c.intermediate_size)
    else:
        yield from experts(block, c, c.num_experts, c.moe_intermediate_size)
        yield from router(f"{block}.gate", c, c.num_experts)
    yield from norm(f"{name}.operator_norm", hidden)
    yield from norm(f"{name}.ffn_norm", hidden)


def _kinds(c: PlainConfig) -> Sequence[str]:
    """Return the type of each layer in families that mix attention with linear attention or convolution."""
    other = "conv" if c.model_type == "lfm2_moe" else "linear_attention"
    kinds = _each_of(c, "layer_types", ("full_attention", other))
    if not kinds and other == "linear_attention":
        every = c.get("full_attention_interval", 4)
        return ["full_attention" if (n + 1) % every == 0 else "linear_attention" for n in range(c.num_hidden_layers)]
    if not kinds:
        raise UndescribedError("layer_types")
    return kinds


def in_every_layer(c: PlainConfig) -> tuple[int, int, int]:
    """Return the cache sizes of a model of which every layer stores keys and values: (numbers per token, numbers per
    sequence in the model's dtype, numbers per sequence in float32)."""
    return c.num_hidden_layers * 2 * c.num_key_value_heads * head_dim(c), 0, 0


def latents(c: PlainConfig) -> tuple[int, int, int]:
    return c.num_hidden_layers * (c.kv_lora_rank + c.qk_rope_head_dim), 0, 0


def latents_and_index(c: PlainConfig) -> tuple[int, int, int]:
    return latents(c)[0] + _indexers(c).count("full") * c.index_head_dim, 0, 0


def with_linear_attention(c: PlainConfig) -> tuple[int, int, int]:
    full = _kinds(c).count("full_attention")
    rest, (keys, values) = c.num_hidden_layers - full, _linear_widths(c)
    convolved = rest * (2 * keys + values) * c.linear_conv_kernel_dim
    recurrent = rest * c.linear_num_value_heads * c.linear_key_head_dim * c.linear_value_head_dim
    return full * 2 * c.num_key_value_heads * head_dim(c), convolved, recurrent


def with_convolutions(c: PlainConfig) -> tuple[int, int, int]:
    full = _kinds(c).count("full_attention")
    convolved = (c.num_hidden_layers - full) * c.hidden_size * c.conv_L_cache
    return full * 2 * c.num_key_value_heads * head_dim(c), convolved, 0
