"""Computes several tokens of one text through a decoder layer, with few calls between the layer's products.

    normed   = norm(x)
    q, k, v  = products of normed
    q        = norm of heads and rotary embedding, one call, which also writes keys and values into the KV cache
    after    = x + product(attention(q, the KV cache))
    y        = after + mlp(norm(after))        not here: transformers' mlp, or `ResidentMlp` (`fast_layer.py`)

transformers computes the heads by some twenty operations on whole tensors: 0.4 ms of the 8 ms that a layer takes for 16
tokens (docs/log/kernels.md). The bits are the same, which `layer_proof.py` tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smoe.fastpath import attention
from smoe.fastpath.prompt_attention import hides_the_future
from smoe.kernels import residual
from smoe.kernels.prompt_heads import PromptHeads
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.token_attention import Parts, Place
from smoe.models.kv_cache import Positioned, RowCache


class PromptLayer:
    """The attention, the residual sum after it and both norms of one decoder layer, for several tokens of one text."""

    def __init__(self, own: nn.Module, parts: Parts, pool: SpinningPool) -> None:
        """`own`: the layer's attention module."""
        self._own, self._parts, self._pool = own, parts, pool
        self._heads = PromptHeads(pool, parts)
        self._index: int = own.layer_idx  # type: ignore[assignment]

    def place(self, hidden: torch.Tensor, mask: torch.Tensor | None, embeddings: Any, cache: Any) -> Place | None:
        """Return the storage in the KV cache for the keys and values of the tokens. Return None if the call is not for
        several tokens of one text that attend to themselves and to all earlier tokens, or if our kernel does not
        compute their attention."""
        if attention.prompt_kernel_of(self._own) is None or not _are_rows(hidden) or hidden.shape[1] < 2:
            return None
        if not isinstance(embeddings, tuple) or not all(map(_are_rows, embeddings)):
            return None
        if any(each.shape[1:] != (hidden.shape[1], self._parts.rotary) for each in embeddings):
            return None
        if not isinstance(cache, RowCache) or cache.rows != 1 or cache.row_lengths is not None:
            return None
        layer, tokens = cache.layers[self._index], hidden.shape[1]
        if not isinstance(layer, Positioned) or not getattr(self._own, "is_causal", False):
            return None
        if bool(cache.length) if mask is None else not hides_the_future(mask, tokens, cache.length + tokens):
            return None
        place = Place(*layer.reserved_place(hidden, self._parts.key_heads, self._parts.size))
        return place if place.end + tokens <= place.keys.shape[2] else None  # transformers' function raises an error

    def __call__(
        self, hidden: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor], place: Place
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states after attention, and their norm, both [1, T, H], for `hidden` [1, T, H]."""
        own, parts, kernel = self._own, self._parts, attention.prompt_kernel_of(self._own)
        assert kernel is not None, "place() has returned a place"
        normed = residual.normed(self._pool, hidden, parts.norm)
        rows = tuple(own.get_submodule(name).forward(normed) for name in ("q_proj", "k_proj", "v_proj"))
        query = self._heads(rows, *embeddings, place)
        keys, values, begin, end = place
        seen = slice(begin, end + hidden.shape[1])
        attended = kernel(query, keys[:, :, seen], values[:, :, seen], parts.scale)
        output = own.get_submodule("o_proj").forward(attended.flatten(2))
        return residual.added_and_normed(self._pool, hidden, output, parts.last_norm)


def _are_rows(x: object) -> bool:
    """Return whether `x` contains rows [1, T, size] of bf16 numbers on the CPU, one after the other."""
    if not isinstance(x, torch.Tensor) or type(x) is not torch.Tensor or x.dtype is not torch.bfloat16:
        return False
    return x.is_cpu and x.dim() == 3 and x.shape[0] == 1 and x.is_contiguous() and not x.requires_grad
