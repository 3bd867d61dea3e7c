"""Prepares the heads of a prompt's tokens for attention, on all threads of a pool: norm of heads, rotary embedding, and
keys and values on their way to the KV cache.

The machine code is that of a single token (`token_attention.py`), in a loop over tokens.
"""

from __future__ import annotations

import torch

from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.token_attention import Parts, Place, bits_of, functions_of_layers

_STEP = 4
"""The number of tokens that a thread takes at a time."""
_WAKING_TOKENS = 64
"""The number of tokens below which one thread is faster than waking others that sleep."""


class PromptHeads:
    """Prepares the heads of several tokens in one decoder layer."""

    def __init__(self, pool: SpinningPool, parts: Parts) -> None:
        self._pool = pool
        self._parts = parts
        *_, self._function = functions_of_layers()

    def __call__(
        self, rows: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, place: Place
    ) -> torch.Tensor:
        """Return the queries [1, heads, T, size], and write keys and values into the KV cache, from the index
        `place.end` on.

        `rows`: the outputs of the projections q, k and v, each [1, T, outputs]. The queries are rotated in the memory
        of the first one. cos and sin are [1, T, rotary]. All are contiguous and in bf16.
        """
        parts, tokens = self._parts, rows[0].shape[1]
        keys, values, _, end = place
        (_, key_head, key_row, _), (_, value_head, value_row, _) = keys.stride(), values.stride()
        norms = parts.q_norm, parts.k_norm
        arguments = (
            cos.data_ptr(), sin.data_ptr(), keys.data_ptr() + 2 * key_row * end,
            values.data_ptr() + 2 * value_row * end, key_head, value_head, *(row.data_ptr() for row in rows),
            *(0 if each is None else each.at() for each in norms),
            *(0 if each is None else bits_of(each.eps) for each in norms), parts.size, parts.rotary,
            parts.heads // parts.key_heads, parts.key_heads, tokens, _STEP, 2 * key_row, 2 * value_row,
        )  # fmt: skip
        self._pool.share(self._function, arguments, -(-tokens // _STEP), tokens >= _WAKING_TOKENS)
        return rows[0].view(1, tokens, parts.heads, parts.size).transpose(1, 2)
