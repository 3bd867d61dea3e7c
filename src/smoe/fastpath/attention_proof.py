"""Proofs of the attention kernel for single tokens.

A kernel is used if its bits equal torch's. A wrong order of sums changes very few rounded outputs, so the test uses
data that reveal it:

* Every key occurs twice, with opposite values. What remains of an output is the rounding error of its sums.
* The last key has the largest score, zero, and weighs as much as all other keys together. torch also returns the
  logarithm of the sum of weights, which has almost as many significant digits as the sum, so comparing logarithms
  compares the sums.
* Few keys have equal scores, and their values differ by one step of bf16. The outputs are midway between two bf16
  numbers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from smoe.kernels.attention import attend, fits, libm
from smoe.kernels.proof import is_no_further, same_bits
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.threads import threads

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_PAIRED = (7, 15, 37, 90, 250, 515, 701)
"""Numbers of keys to test: below and above vector registers of 16 and 32 elements, around blocks of 512, whole blocks,
and every remainder of 4."""
_MIDWAY = (6, 14)
"""Even numbers of keys with equal weight. For 14 keys, dividing by the sum of weights and multiplying by its reciprocal
differ in many outputs."""
_PROOF_OUTPUTS = 1 << 12
"""The number of outputs to compare for each number of keys. With so many, every other order of sums that was tried
differs in more than one output (docs/log/kernels.md)."""
_NEAR_KEYS = 300


class Shape(NamedTuple):
    """The number and size of the attention heads. The result of a test holds for all modules of one shape."""

    heads: int
    key_heads: int
    size: int


def agrees(pool: SpinningPool, library: Attention, module: nn.Module, shape: Shape) -> bool:
    """Return whether the kernel has the bits of torch's attention on one thread, and also those of transformers'
    function `library`, called as `module` calls it, on all threads."""
    flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if flash is None:
        return False
    found: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
    with torch.no_grad(), threads(1):
        for query, keys, values, scale in _data(shape):
            if not fits(query, keys, values):
                return False
            ours, sums = attend(pool, query, keys, values, scale)
            theirs, logarithms = flash(query, keys, values, scale=scale)
            if not (same_bits(ours.transpose(1, 2), theirs) and same_bits(_logarithms(sums), logarithms.flatten())):
                return False
            found[keys.shape[2]] = ours, (query, keys, values, scale)
    with torch.no_grad():
        return all(
            same_bits(ours, library(module, *tensors, None, dropout=0.0, scaling=scale)[0])
            for ours, (*tensors, scale) in found.values()
        )


def is_the_same_on_one_thread(library: Attention, module: nn.Module, shape: Shape) -> bool:
    """Return whether torch's attention for one token has the same bits on one thread and on all threads. `library`:
    transformers' attention function; `module`: a module that calls it."""
    if torch.get_num_threads() == 1:
        return True
    answers = []
    for count in (1, torch.get_num_threads()):
        with torch.no_grad(), threads(count):
            answers.append(
                [library(module, *tensors, None, dropout=0.0, scaling=scale)[0] for *tensors, scale in _data(shape)]
            )
    return all(map(same_bits, *answers))


def is_accurate(pool: SpinningPool, library: Attention, module: nn.Module, shape: Shape) -> bool:
    """Return whether the attention kernel is about as accurate as `library`: its mean square error against float64 is
    at most a tenth larger."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, shape.heads, 1, shape.size, generator=generator).bfloat16()
    keys, values = torch.randn(2, 1, shape.key_heads, _NEAR_KEYS, shape.size, generator=generator).bfloat16()
    if not fits(query, keys, values):
        return False
    scale, shared = shape.size**-0.5, shape.heads // shape.key_heads
    wide_keys, wide_values = (each.double().repeat_interleave(shared, 1) for each in (keys, values))
    exact = functional.scaled_dot_product_attention(query.double(), wide_keys, wide_values, scale=scale).transpose(1, 2)

    def ours() -> torch.Tensor:
        return attend(pool, query, keys, values, scale)[0]

    def theirs() -> torch.Tensor:
        return library(module, query, keys, values, None, dropout=0.0, scaling=scale)[0]

    with torch.no_grad():
        return is_no_further(ours(), theirs(), exact)


def _data(shape: Shape) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """Yield test cases for attention of one token: a query [1, heads, 1, size], keys and values [1, key heads, n,
    size], and a scale."""
    heads, key_heads, size = shape
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=generator)

    for n in _PAIRED:
        half = n // 2
        keys, values = -numbers(1, key_heads, half, size), numbers(1, key_heads, half, size) - 0.5
        last = torch.zeros(1, key_heads, 1, size)
        keys = torch.cat([keys, keys.flip(2), last], 2).bfloat16()
        values = torch.cat([values, -values.flip(2), last], 2).bfloat16()
        for _ in range(-(-_PROOF_OUTPUTS // (heads * size))):
            yield numbers(1, heads, 1, size).bfloat16(), keys, values, 4 * math.log(n) / size
    for n in _MIDWAY:
        first = numbers(1, key_heads, 1, size).bfloat16().view(torch.int16)
        values = (first + torch.arange(n, dtype=torch.int16).view(1, 1, n, 1) % 2).view(torch.bfloat16)
        yield torch.zeros(1, heads, 1, size).bfloat16(), torch.zeros_like(values), values, 1.0


def _logarithms(sums: torch.Tensor) -> torch.Tensor:
    """Return the logarithms of the sums of exponentials in softmax, as torch returns them. `sums` [heads, 2]: the
    largest score and the sum of weights. The logarithm function is libm's, as in torch."""
    mathematics = libm()
    assert mathematics is not None
    logarithm = mathematics.logf
    logarithm.argtypes, logarithm.restype = (ctypes.c_float,), ctypes.c_float
    return sums[:, 0] + torch.tensor([logarithm(total) for total in sums[:, 1].tolist()])
