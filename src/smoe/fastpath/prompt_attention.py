"""Computes the attention of several tokens by our kernel in place of torch's, where equality up to rounding suffices
(E1).

The kernel computes prompts of causal models: calls without a mask, or with a mask that hides only later positions, as
for chunks of a long prompt, whose keys include those of earlier chunks. A row's bits then depend neither on other rows
of the prompt nor on the chunks (`kernels/prompt_attention.py`), except that a last chunk of one token is computed as in
decoding. torch computes windows, padding and everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smoe.kernels.prompt_attention import PromptAttention, fits
from smoe.kernels.proof import is_no_further

_NEAR_TOKENS, _NEAR_KEYS = 100, 300
"""The numbers of tokens and keys in the test of accuracy: several blocks of each, with a remainder."""


class SeveralQueries:
    """The attention kernel for several query tokens, for one shape of heads."""

    def __init__(self, attend: PromptAttention, heads: int, key_heads: int, size: int) -> None:
        self._attend = attend
        self._heads, self._key_heads, self._size = heads, key_heads, size

    def serves(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        is_causal: bool,
    ) -> bool:
        """Return whether the kernel can compute attention for these tensors: several tokens, each of which attends to
        itself and to all earlier tokens.

        `is_causal`: whether torch's function hides later keys if it gets no mask.
        """
        _, heads, tokens, size = query.shape
        if tokens < 2 or (heads, keys.shape[1], size) != (self._heads, self._key_heads, self._size) or scale <= 0:
            return False
        if not fits(query, keys, values) or query.requires_grad:
            return False
        if mask is None:
            return is_causal and tokens == keys.shape[2]
        return hides_the_future(mask, tokens, keys.shape[2])

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention's output for queries [1, heads, tokens, size]."""
        return self._attend(query, keys, values, scale)


def hides_the_future(mask: torch.Tensor, tokens: int, keys: int) -> bool:
    """Return whether a mask lets each of the last `tokens` of `keys` positions attend to itself and all earlier
    positions, and to no others.

    The check needs only the first row, the first column and equality along diagonals, so no second mask is created.
    """
    if mask.dtype is not torch.bool or mask.shape != (1, 1, tokens, keys):
        return False
    rows, seen = mask[0, 0], keys - tokens + 1
    return (
        bool(rows[0, :seen].all())
        and not bool(rows[0, seen:].any())
        and bool(rows[:, 0].all())
        and torch.equal(rows[1:, 1:], rows[:-1, :-1])
    )


def is_accurate(
    attend: PromptAttention,
    library: Callable[..., Any],
    module: nn.Module,
    heads: int,
    key_heads: int,
    size: int,
) -> bool:
    """Return whether the attention kernel is about as accurate as `library`, called as `module` calls it: its mean
    square error against float64 is at most a tenth larger.

    Times are not compared: a choice by time could differ between two loads, and with it the bits of a result. On CPUs
    with AMX torch's attention is faster from some 500 tokens on, and ours below.
    """
    generator, scale = torch.Generator().manual_seed(0), size**-0.5
    query = torch.randn(1, heads, _NEAR_TOKENS, size, generator=generator).bfloat16()
    keys, values = torch.randn(2, 1, key_heads, _NEAR_KEYS, size, generator=generator).bfloat16()
    if not fits(query, keys, values):
        return False
    mask = torch.ones(1, 1, _NEAR_TOKENS, _NEAR_KEYS, dtype=torch.bool).tril(_NEAR_KEYS - _NEAR_TOKENS)
    few = heads // key_heads
    with torch.no_grad():
        ours = attend(query, keys, values, scale)
        theirs: torch.Tensor = library(module, query, keys, values, mask, dropout=0.0, scaling=scale)[0]
        exact = _exact(query[:, :few], keys[:, :1], values[:, :1], mask, scale)
        return is_no_further(ours[:, :, :few], theirs[:, :, :few], exact)


def _exact(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention output for one key head, computed in float64: [1, m, heads, size]. (All key heads would take
    too long.)"""
    scores = (query.double() @ keys.double().transpose(2, 3) * scale).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ values.double()).transpose(1, 2)
