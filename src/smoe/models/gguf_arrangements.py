"""Functions that convert tensors of a GGUF file to transformers weights, for the `Arrangement`s in the family tables.

Each function reverses a step of llama.cpp's converter. Tensors are matrices [rows, columns] or vectors [rows].
Functions that only move rows also accept quantized codes, [rows, bytes of a row].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from smoe.models.gguf_family import Arrangement

if TYPE_CHECKING:
    import torch

Tensors = Sequence["torch.Tensor"]


def _half_a_head_apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of a query or key matrix in another order within each head. The two rows of a rotary pair are
    neighbours before, and half a head apart afterwards."""
    apart: torch.Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return apart


def paired_rows(attention: str) -> dict[str, Arrangement]:
    """Return the conversions of the query and key matrices of the module `attention`, for families whose files store
    the two rows of a rotary pair next to each other."""
    return {
        f"{attention}.{matrix}.{suffix}": Arrangement(
            lambda parts, config, count=count: _half_a_head_apart(parts[0], getattr(config, count)),  # type: ignore[misc]
            moves_rows=True,
        )
        for matrix, count in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads"))
        for suffix in ("weight", "bias")
    }


PAIRED_ROWS = paired_rows("self_attn")


def _paired_at_the_end(count: str | None) -> Arrangement:
    """Return the conversion of a matrix of latent attention whose heads end with the dimensions that rotary embeddings
    rotate. `count`: the configuration field with the number of heads; None: one head."""

    def whole(parts: Tensors, config: Any) -> torch.Tensor:
        import torch

        heads = parts[0].unflatten(0, (1 if count is None else getattr(config, count), -1))
        width = config.qk_rope_head_dim
        apart = [_half_a_head_apart(head[-width:], 1) for head in heads]
        return torch.cat([heads[:, :-width], torch.stack(apart)], 1).flatten(0, 1)

    return Arrangement(whole, moves_rows=True)


PAIRED_LATENT_ROWS = {
    "self_attn.q_b_proj.weight": _paired_at_the_end("num_attention_heads"),
    "self_attn.kv_a_proj_with_mqa.weight": _paired_at_the_end(None),
    "self_attn.indexer.wq_b.weight": _paired_at_the_end("index_n_heads"),
    **{f"self_attn.indexer.{name}": _paired_at_the_end(None) for name in ("wk.weight", "k_norm.weight", "k_norm.bias")},
}
"""The conversions of latent attention and its indexer, for families whose files store the two rows of a rotary pair
next to each other."""


def _latent_values(parts: Tensors, config: Any) -> torch.Tensor:
    """Return one matrix made of keys [heads, rank, width], transposed, and values [heads, width, rank], head by
    head."""
    import torch

    keys, values = parts
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


KEYS_AND_VALUES = {"self_attn.kv_b_proj.weight": Arrangement(_latent_values, ("attn_k_b.weight", "attn_v_b.weight"))}
"""The arrangement of multi-head latent attention, whose files store the matrix of keys and values as two tensors."""


def _less_one(parts: Tensors, config: Any) -> torch.Tensor:
    return parts[0].float() - 1


def _logarithm(parts: Tensors, config: Any) -> torch.Tensor:
    """Return the weight A_log of a state-space layer, computed from the stored -exp(A_log)."""
    return (-parts[0].float()).log()


RESHAPED = Arrangement(lambda parts, config: parts[0])
"""An arrangement that changes only the shape."""
LESS_ONE = Arrangement(_less_one)
"""Subtracts 1 from a norm's weight, because transformers adds 1 to it and files include this 1."""
LOGARITHM = Arrangement(_logarithm)
POSITIVE_LOGARITHM = Arrangement(lambda parts, config: parts[0].float().log())
"""A_log of a state-space layer, computed from the stored exp(A_log)."""


def _unscaled(parts: Tensors, config: Any) -> torch.Tensor:
    scale: float = (config.hidden_size / parts[0].numel()) ** 0.5
    return parts[0].float() / scale


UNSCALED_LATENT_NORMS = {f"self_attn.{kind}_a_layernorm.weight": Arrangement(_unscaled) for kind in ("q", "kv")}
"""Norms of latents, which files store times the factor by which transformers multiplies their outputs."""


def _query_key_value_gate(parts: Tensors, config: Any) -> torch.Tensor:
    """Return queries, keys, values and gates as one matrix, head by head."""
    import torch

    stacked, gates = parts
    heads, key = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    queries, keys, values = stacked.tensor_split((key, 2 * key))
    each = [rows.unflatten(0, (heads, -1)) for rows in (queries, keys, values, gates)]
    return torch.cat(each, 1).flatten(0, 1)


QUERY_KEY_VALUE_GATE = Arrangement(_query_key_value_gate, ("attn_qkv.weight", "attn_gate.weight"), moves_rows=True)


def _grouped(rows: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the rows of value heads in another order, in which value heads of the same key head are neighbours."""
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    grouped: torch.Tensor = rows.unflatten(0, (heads // groups, groups, -1)).transpose(0, 1).flatten(0, 2)
    return grouped


def _grouped_behind_keys(parts: Tensors, config: Any) -> torch.Tensor:
    """Return a matrix of queries, keys and values. The value heads are reordered as by `_grouped`; queries and keys are
    unchanged."""
    import torch

    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    rows = parts[0]
    return torch.cat([rows[:keys], _grouped(rows[keys:], config)])


_GROUPED = Arrangement(lambda parts, config: _grouped(parts[0], config), moves_rows=True)
_GROUPED_BEHIND_KEYS = Arrangement(_grouped_behind_keys, moves_rows=True)
GROUPED_STATE = {
    "linear_attn.A_log": Arrangement(lambda parts, config: _logarithm([_grouped(parts[0], config)], config)),
    "linear_attn.conv1d.weight": _GROUPED_BEHIND_KEYS,
    "linear_attn.dt_bias": _GROUPED,
    "linear_attn.in_proj_a.weight": _GROUPED,
    "linear_attn.in_proj_b.weight": _GROUPED,
    "linear_attn.in_proj_qkv.weight": _GROUPED_BEHIND_KEYS,
    "linear_attn.in_proj_z.weight": _GROUPED,
    "linear_attn.out_proj.weight": Arrangement(
        lambda parts, config: _grouped(parts[0].T, config).T, moves_columns=True
    ),
}
"""The arrangements of linear attention in files from Qwen3.5 on, whose value heads are in another order."""


def _joined(parts: Tensors, config: Any) -> torch.Tensor:
    """Return one matrix with the rows of all tensors, one tensor after the other."""
    import torch

    return torch.cat(list(parts))


JOINED_INDEXER = Arrangement(_joined, ("indexer.q_proj.weight", "indexer.k_proj.weight"), moves_rows=True)
"""The query and key matrices of an indexer, which transformers stores as one matrix."""
JOINED_DENSE = Arrangement(_joined, ("ffn_gate.weight", "ffn_up.weight"), moves_rows=True)
"""The gate and up matrices of a dense layer, which transformers stores as one matrix."""
JOINED_SHARED = Arrangement(_joined, ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), moves_rows=True)
"""The gate and up matrices of a shared expert, which transformers stores as one matrix."""


def _joined_convolutions(parts: Tensors, config: Any) -> torch.Tensor:
    return _joined([part.reshape(-1, part.shape[-1]) for part in parts], config)


JOINED_CONVOLUTIONS = Arrangement(_joined_convolutions, tuple(f"ssm_conv1d_{kind}.weight" for kind in "qkv"))
"""The convolutions of queries, keys and values, which transformers stores as one tensor."""


def _rows_of(kind: str) -> Arrangement:
    """Return the conversion that takes the queries, keys or values (`kind` q, k or v) from a matrix that contains all
    three. Layers may differ in the number of key-value heads."""

    def rows(parts: Tensors, config: Any) -> torch.Tensor:
        width = config.head_dim
        queries = config.num_attention_heads * width
        others = len(parts[0]) - queries
        keys = others * width // (width + getattr(config, "v_head_dim", width))
        split = parts[0].split([queries, keys, others - keys])
        found: torch.Tensor = split["qkv".index(kind)]
        return found

    return Arrangement(rows, ("attn_qkv.weight",), is_part=True, moves_rows=True)


SPLIT_ATTENTION = {f"self_attn.{kind}_proj.weight": _rows_of(kind) for kind in "qkv"}
"""The arrangements of query, key and value projections that files store as one matrix."""

STATE_GATE = Arrangement(lambda parts, config: parts[0], ("ssm_g_a.weight",), moves_rows=True)
"""A gate whose tensor has this name in layers with linear attention, and another name in other layers."""
