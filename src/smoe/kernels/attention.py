"""Computes attention of one query token over a bf16 KV cache, several times faster than torch and with torch's bits.

In decoding, torch computes each query head as a matrix product with one column, for which MKL has no fast bf16 code. It
takes 1 ms for 16 heads of 128 elements and 300 keys, where memory bandwidth would allow 30 us. Four columns at once
would be ten times faster, with other bits. So this kernel sums in torch's order, and computes only independent sums in
parallel:

    q . k      scores.py             four running sums per key
    softmax    softmax.py            in blocks of 512 keys
    p . v      weighted_values.py    four keys at a time; after each block, earlier totals are multiplied by
                                     exp(old maximum - new maximum)

Query heads that share a key head are computed together, so that each key and value is loaded once. Products of two bf16
numbers are exact in float32, so fused multiplication and addition changes no bit. Before the kernel is used, its bits
are compared with torch's on the same machine (`fastpath/attention.py`). Measurements are in docs/log/kernels.md.
"""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from smoe.kernels.jit import Source, address_of, compile_functions
from smoe.kernels.spinning_pool import SpinningPool

BLOCK = 512
"""The number of keys in a block of the softmax."""
TILE = 32
"""The number of elements of a key or value that are loaded together."""
_MOST_HEADS = 16
"""The largest number of query heads in a unit, the work that one thread takes at a time. Each head needs memory on the
thread's stack."""
_WAKING_PRODUCTS = 1 << 21
"""The number of multiplications below which one thread is faster than waking others that sleep."""
FIELDS = ("query", "keys", "values", "out", "query_head", "key_head", "key_row", "value_head", "value_row", "count",
          "size", "group", "splits", "scale", "exp", "sums")  # fmt: skip
"""The arguments of the kernel, as words of 8 bytes. In this order: the addresses of query, keys, values and output; the
distances in elements between heads and between keys; the number of keys; the head size; query heads per unit; units per
key head; the scale (a float32's bits); the addresses of expf and of `sums`."""


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether the attention kernel supports these tensors: query [1, heads, 1, size], keys and values [1, key
    heads, n, size]."""
    tensors = query, keys, values
    rows, heads, tokens, size = query.shape
    return (
        rows == tokens == 1
        and keys.shape == values.shape
        and keys.shape[0] == 1
        and keys.shape[2] > 0
        and keys.shape[3] == size
        and size % TILE == 0
        and heads % keys.shape[1] == 0
        and all(t.dtype is torch.bfloat16 and t.device.type == "cpu" and t.stride(3) == 1 for t in tensors)
    )


def attend(
    pool: SpinningPool, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output of one token [1, 1, heads, size], and two numbers of each head's softmax as float32
    [heads, 2]: the largest score, and the sum of exp(score - largest). `query`, `keys` and `values` have the shapes
    that `fits` describes."""
    heads, size, count = query.shape[1], query.shape[3], keys.shape[2]
    shared = heads // keys.shape[1]
    group = group_of(shared, heads, pool.threads)
    out, sums = query.new_empty(1, 1, heads, size), torch.empty(heads, 2, dtype=torch.float32)
    compute, exp = functions()
    (scale_bits,) = struct.unpack("I", struct.pack("f", scale))
    fields = (
        *(t.data_ptr() for t in (query, keys, values, out)),
        *(query.stride(1), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2)),
        *(count, size, group, shared // group, scale_bits, exp, sums.data_ptr()),
    )
    assert len(fields) == len(FIELDS), f"{len(fields)} fields of {len(FIELDS)}"
    pool.share(compute, fields, heads // group, is_long=heads * count * size >= _WAKING_PRODUCTS)
    return out, sums


def group_of(shared: int, heads: int, threads: int) -> int:
    """Return the number of query heads that one thread computes at a time: all query heads that share a key head
    (`shared`), or a divisor of their number if threads would otherwise be idle."""
    parts = [n for n in range(1, shared + 1) if shared % n == 0 and n <= _MOST_HEADS]
    return max((n for n in parts if heads // n >= 2 * threads), default=1)


@functools.cache
def libm() -> ctypes.CDLL | None:
    """Return the C mathematical library (glibc's libm), whose `expf` has torch's bits, or None on systems without
    glibc."""
    try:
        return ctypes.CDLL("libm.so.6")
    except OSError:
        return None


@functools.cache
def functions() -> tuple[int, int]:
    """Return the addresses of the kernel, which is compiled once per process, and of libm's expf."""
    mathematics = libm()
    assert mathematics is not None, "call this only where `libm` returns a library"
    signature = (ctypes.c_void_p, ctypes.c_longlong)
    (attention,) = compile_functions(Source(source), {"attention": signature})
    return address_of(attention), address_of(mathematics.expf)


def source() -> str:
    """Return the LLVM text of the kernel. Its function `attention(fields, unit)` computes the query heads of a unit."""
    from smoe.kernels.attention_code import module_of

    return module_of()
