"""Attention of several tokens by our kernel, in the place of the library's where equal up to rounding will do (E1).

Served is what a causal model asks of a prompt: no mask, or one that hides the future and nothing else, as the pieces of
a long prompt have it, whose keys are those of all pieces so far. A row's bits then depend on no other row of the prompt
and not on where it is cut (`kernels/prompt_attention.py`), but for a last piece of a single token, which is attended to
as in decoding. Windows, padding and all else are left to the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn

from smoe.kernels.jit import cpu_has
from smoe.kernels.prompt_attention import PromptAttention, fits
from smoe.kernels.proof import is_no_further
from smoe.kernels.spinning_pool import OWN_ORDER_GAIN

_NEAR_TOKENS, _NEAR_KEYS = 100, 300
"""Of the proof: several blocks of keys and of rows, and a remainder of each. As many tokens alone are timed."""
_TURNS = 9
_AMX = "amx-bf16"


class SeveralQueries:
    """The kernel for the heads of one shape."""

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
        """Whether this is what was proven: several tokens, each of which sees all before it and itself. `is_causal`:
        the library would have it so without a mask."""
        _, heads, tokens, size = query.shape
        if tokens < 2 or (heads, keys.shape[1], size) != (self._heads, self._key_heads, self._size) or scale <= 0:
            return False
        if not fits(query, keys, values) or query.requires_grad:
            return False
        if mask is None:
            return is_causal and tokens == keys.shape[2]
        return hides_the_future(mask, tokens, keys.shape[2])

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return self._attend(query, keys, values, scale)


def hides_the_future(mask: torch.Tensor, tokens: int, keys: int) -> bool:
    """Whether a mask lets the last `tokens` of so many keys' positions see what is not after them, and all of that.

    Its first row and column say so, and every diagonal is of one kind; compared so, no second mask is made.
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


def must_be_measured() -> bool:
    """Whether this CPU has matrix instructions for the library that the kernel lacks. On all others that were tried it
    is 1.5 to 9 times as fast, at every length, and time need not choose."""
    return cpu_has(_AMX)


def gains(
    attend: PromptAttention,
    library: Callable[..., Any],
    module: nn.Module,
    heads: int,
    key_heads: int,
    size: int,
    is_measured: bool,
) -> bool:
    """Whether the kernel is no further from the exact attention than `library` is, as `module` calls it, on average,
    and faster (taken for granted unless `is_measured`)."""
    generator, scale = torch.Generator().manual_seed(0), size**-0.5
    query = torch.randn(1, heads, _NEAR_TOKENS, size, generator=generator).bfloat16()
    keys, values = torch.randn(2, 1, key_heads, _NEAR_KEYS, size, generator=generator).bfloat16()
    if not fits(query, keys, values):
        return False
    mask = torch.ones(1, 1, _NEAR_TOKENS, _NEAR_KEYS, dtype=torch.bool).tril(_NEAR_KEYS - _NEAR_TOKENS)

    def theirs(some: slice, mask: torch.Tensor | None) -> torch.Tensor:
        """Of the first positions."""
        tensors = query[:, :, some], keys[:, :, some], values[:, :, some]
        answer: torch.Tensor = library(module, *tensors, mask, dropout=0.0, scaling=scale)[0]
        return answer

    def ours(some: slice) -> torch.Tensor:
        return attend(query[:, :, some], keys[:, :, some], values[:, :, some], scale)

    few, whole, timed = heads // key_heads, slice(None), slice(_NEAR_TOKENS)
    with torch.no_grad():
        exact = _exact(query[:, :few], keys[:, :1], values[:, :1], mask, scale)
        if not is_no_further(ours(whole)[:, :, :few], theirs(whole, mask)[:, :, :few], exact):
            return False
        return not is_measured or OWN_ORDER_GAIN * fastest_seconds(lambda: ours(timed)) < fastest_seconds(
            lambda: theirs(timed, None)
        )


def _exact(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """[1, m, heads, size] of one key head in float64: of all heads it would take longest."""
    scores = (query.double() @ keys.double().transpose(2, 3) * scale).masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ values.double()).transpose(1, 2)


def fastest_seconds(job: Callable[[], object]) -> float:
    """Of a few times."""

    def once() -> float:
        began = perf_counter()
        job()
        return perf_counter() - began

    return min(once() for _ in range(_TURNS))
