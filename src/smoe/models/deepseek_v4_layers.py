"""The weights, buffers and cache sizes of DeepSeek-V4, for `families.py`.

Every layer has attention with one key-value head whose keys are also the values, over a sliding window and over
compressed tokens, and experts. Two hyper-connections in every layer divide the hidden state into several streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smoe.models.family_parts import Weights, experts, gated, linear, norm, norms, router
from smoe.models.outline import Buffer, Weight
from smoe.models.plain_config import PlainConfig, UndescribedError

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
"""{compression rate of a layer in a published configuration: the type of its attention}."""
_RATES = {_SPARSE: 4, _HEAVY: 128}
"""{type of attention: the usual number of tokens that are compressed to one}."""
_BY_TOKENS = "hash_moe"
_ROTATED = 64 / 512
"""The usual fraction of a head that rotary embeddings rotate."""
_ROTARY_KINDS = ("main", "compress")
_PROBED_TOKENS = 2
"""The number of tokens of the probe by which the library's cache is measured (`examine.py`)."""


def usual_form(stated: dict[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the rotary parameters in one place, and the types of attention by name. The parameters of
    compressed layers contain the scaling of the context, which the others lack."""
    fields = {key: value for key, value in stated.items() if value is not None}
    rotary = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if isinstance(rotary, Mapping) and isinstance(rotary.get("compress"), Mapping):
        fields |= {"rope_parameters": dict(rotary["compress"]), "rope_scaling": None}
    ratios = fields.get("compress_ratios")
    if isinstance(ratios, list) and "layer_types" not in fields:
        if not set(_KINDS).issuperset(ratios):
            raise UndescribedError(f"compress_ratios {ratios!r:.80}")
        fields["layer_types"] = [_KINDS[each] for each in ratios[: fields.get("num_hidden_layers", len(ratios))]]
    return fields


def layer(name: str, c: PlainConfig, layer: int) -> Weights:
    yield from _attention(f"{name}.self_attn", c, _kinds(c)[layer])
    yield from router(f"{name}.mlp.gate", c, c.n_routed_experts)
    yield from experts(f"{name}.mlp", c, c.n_routed_experts, c.moe_intermediate_size)
    yield from gated(f"{name}.mlp.shared_experts", c, c.moe_intermediate_size)
    yield from _wide(norms(name, c))
    streams = c.hc_mult
    rows = (2 + streams) * streams
    for of in ("attn_hc", "ffn_hc"):
        yield f"{name}.{of}.fn", Weight((rows, streams * c.hidden_size), is_wide=True)
        yield f"{name}.{of}.base", Weight((rows,), is_wide=True)
        yield f"{name}.{of}.scale", Weight((3,), is_wide=True)


def _attention(name: str, c: PlainConfig, kind: str) -> Weights:
    width = c.num_attention_heads * c.head_dim
    yield f"{name}.sinks", Weight((c.num_attention_heads,), is_wide=True)
    yield from linear(f"{name}.q_a_proj", c.q_lora_rank, c.hidden_size)
    yield from _wide(norm(f"{name}.q_a_norm", c.q_lora_rank))
    yield from linear(f"{name}.q_b_proj", width, c.q_lora_rank)
    yield from linear(f"{name}.kv_proj", c.head_dim, c.hidden_size)
    yield from _wide(norm(f"{name}.kv_norm", c.head_dim))
    yield f"{name}.o_a_proj.weight", Weight((c.o_groups * c.o_lora_rank, width // c.o_groups), is_linear=True)
    yield from linear(f"{name}.o_b_proj", c.hidden_size, c.o_groups * c.o_lora_rank)
    if kind == _WINDOW:
        return
    compressor, indexer = f"{name}.compressor", f"{name}.compressor.indexer"
    yield from _compressor(compressor, c, kind, c.head_dim)
    if kind == _SPARSE:
        yield from _compressor(indexer, c, kind, c.index_head_dim)
        yield from linear(f"{indexer}.q_b_proj", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        yield from linear(f"{indexer}.scorer.weights_proj", c.index_n_heads, c.hidden_size)


def _compressor(name: str, c: PlainConfig, kind: str, size: int) -> Weights:
    """Yield the weights that compress the keys of several tokens, in vectors of `size` numbers, to one."""
    width = _width(kind, size)
    yield f"{name}.position_bias", Weight((_rate(c, kind), width), is_wide=True)
    yield from linear(f"{name}.kv_proj", width, c.hidden_size)
    yield from linear(f"{name}.gate_proj", width, c.hidden_size)
    yield from _wide(norm(f"{name}.kv_norm", size))


def _width(kind: str, size: int) -> int:
    """Return the numbers of a token before compression. Windows that overlap have two series."""
    return 2 * size if kind == _SPARSE else size


def _rate(c: PlainConfig, kind: str) -> int:
    """Return the number of tokens that a layer compresses to one."""
    old = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}[kind]
    rate = c.get(old, (c.get("compress_rates") or _RATES).get(kind))
    if type(rate) is not int or rate <= _PROBED_TOKENS:
        raise UndescribedError(f"a layer compresses {rate!r:.80} tokens to one")
    return rate


def _wide(weights: Weights) -> Weights:
    """Yield the weights as float32, in which the library computes them."""
    return ((name, weight._replace(is_wide=True)) for name, weight in weights)


def _kinds(c: PlainConfig) -> Sequence[str]:
    """Return the type of attention of each layer."""
    return _each_of(c, "layer_types", (_WINDOW, _SPARSE, _HEAVY)) or [
        _SPARSE if n % 2 and n > 1 else _HEAVY for n in range(c.num_hidden_layers)
    ]


def _each_of(c: PlainConfig, field: str, known: Sequence[str]) -> Sequence[str]:
    words: Sequence[str] = getattr(c, field)
    if words and (len(words) != c.num_hidden_layers or not set(known).issuperset(words)):
        raise UndescribedError(f"{field} {words!r:.80}")
    return words


def is_by_tokens(c: PlainConfig, layer: int) -> bool:
    """Return whether a layer chooses experts by a table of tokens."""
    kinds = _each_of(c, "mlp_layer_types", (_BY_TOKENS, "moe"))
    return kinds[layer] == _BY_TOKENS if kinds else layer < int(c.num_hash_layers)


def head(c: PlainConfig) -> Weights:
    """Yield the weights that add the streams, and the last norm."""
    yield from _wide(norm("model.norm", c.hidden_size))
    yield "model.hc_head.hc_fn", Weight((c.hc_mult, c.hc_mult * c.hidden_size), is_wide=True)
    yield "model.hc_head.hc_base", Weight((c.hc_mult,), is_wide=True)
    yield "model.hc_head.hc_scale", Weight((1,), is_wide=True)


def buffers(c: PlainConfig) -> Mapping[str, Buffer]:
    """Return the rotary frequencies of every part that rotates, and the tables of experts by token."""
    parts, found = ["model.rotary_emb"], {}
    for number, kind in enumerate(_kinds(c)):
        compressor = f"model.layers.{number}.self_attn.compressor"
        parts += [f"{compressor}.rotary_emb"] * (kind != _WINDOW)
        parts += [f"{compressor}.indexer.rotary_emb"] * (kind == _SPARSE)
        if is_by_tokens(c, number):
            table = Buffer((c.vocab_size, c.num_experts_per_tok), item_bytes=8, is_stored=True)
            found[f"model.layers.{number}.mlp.gate.tid2eid"] = table
    rotated = (int(c.head_dim * _rotated(c)) + 1) // 2
    for part in parts:
        for of in _ROTARY_KINDS:
            found |= {f"{part}.{of}_{name}": Buffer((rotated,)) for name in ("inv_freq", "original_inv_freq")}
    return found


def _rotated(c: PlainConfig) -> float:
    share = c.get("partial_rotary_factor")
    if share is None and c.get("qk_rope_head_dim") is not None:
        share = c.qk_rope_head_dim / c.head_dim
    share = _ROTATED if share is None else share
    if not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise UndescribedError(f"partial_rotary_factor {share!r:.80}")
    return float(share)


def cached(c: PlainConfig) -> tuple[int, int, int]:
    """Return the cache sizes, as `family_layers.in_every_layer` does. The state is that after the probe: the tokens
    that wait for compression, as keys and as gates."""
    waiting = 0
    for kind in _kinds(c):
        sizes = {_WINDOW: (), _HEAVY: (c.head_dim,), _SPARSE: (c.head_dim, c.index_head_dim)}[kind]
        waiting += sum(2 * _PROBED_TOKENS * _width(kind, size) for size in sizes)
    return c.num_hidden_layers * 2 * c.head_dim, waiting, 0
