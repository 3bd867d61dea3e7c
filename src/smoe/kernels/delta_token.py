"""Computes linear attention with the gated delta rule for one token in one function: everything between the projections
of a layer.

    x       <- silu(convolution of the last four values)                            for each channel
    q, k    <- x normalised, q / sqrt(K)                                            for each key head
    S       <- decay S        S <- S + k (gate (v - S^T k))^T        o = S^T q      for each value head
    out     <- weight * (o / rms(o)) * silu(z)                                      for each value head

S is [K, V] in float32, and is read twice: in blocks of columns that stay in the first-level cache. Results are rounded
to bf16 where transformers rounds them, but sums have another order, and the exponential is a polynomial (grade E1).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import NamedTuple

import torch

from smoe.kernels.isa import widest
from smoe.kernels.jit import Source, address_of, compile_functions
from smoe.kernels.spinning_pool import SpinningPool

TAPS = 4
"""The number of values that the convolution multiplies: the last four of a channel are 8 bytes in bf16."""
SMALLEST = 1e-6
"""transformers adds this number to the square of the norm of q and k."""
FIELDS = ("mixed", "last", "taps", "x", "state", "decay", "gate", "z", "weight", "out", "key_size", "shared", "keys",
          "values", "epsilon")  # fmt: skip
"""The arguments of the kernel, as words of 8 bytes: addresses; the number of channels of all keys; value heads per key
head; K; V; the epsilon of the norm (a float32's bits)."""


class Sizes(NamedTuple):
    """The numbers of heads and their sizes."""

    key_heads: int
    heads: int
    """The number of value heads, a multiple of `key_heads`."""
    keys: int
    """K, the elements of a key."""
    values: int
    """V, the elements of a value."""

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.keys + self.heads * self.values


def fits(sizes: Sizes) -> bool:
    """Return whether the kernel supports these sizes on this CPU."""
    isa = widest()
    if isa is None or sizes.heads % sizes.key_heads:
        return False
    return sizes.keys % isa.lanes == 0 and sizes.values % isa.lanes == 0


def attend(
    pool: SpinningPool,
    sizes: Sizes,
    mixed: torch.Tensor,
    last: torch.Tensor,
    taps: torch.Tensor,
    state: torch.Tensor,
    decay: torch.Tensor,
    gate: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
) -> torch.Tensor:
    """Return the output of one token, bf16 [heads * V], and change `last` and `state` in place.

    bf16: `mixed` [channels], the projected token; `last` [channels, 4], the last values of each channel; `taps`
    [channels, 4], the convolution's weight; `z` [heads * V]; `weight` [V], of the norm. float32: `state` [heads, K, V];
    `decay` and `gate` [heads]. All tensors are contiguous.
    """
    out, x = mixed.new_empty(sizes.heads * sizes.values), torch.empty(sizes.channels)
    (bits,) = struct.unpack("I", struct.pack("f", epsilon))
    addresses = (each.data_ptr() for each in (mixed, last, taps, x, state, decay, gate, z, weight, out))
    shared = sizes.heads // sizes.key_heads
    fields = (*addresses, sizes.key_heads * sizes.keys, shared, sizes.keys, sizes.values, bits)
    assert len(fields) == len(FIELDS), f"{len(fields)} fields of {len(FIELDS)}"
    pool.share(_function(sizes.values), fields, sizes.key_heads, is_long=False)
    return out


@functools.cache
def _function(values: int) -> int:
    """Return the address of the machine code for values of V elements, which is compiled once per process."""
    isa = widest()
    assert isa is not None, "call this only where `fits`"
    registers = values // isa.lanes
    together = next(count for count in (4, 2, 1) if registers % count == 0)
    from smoe.kernels import delta_token_code  # requires llvmlite, which is optional

    signature = (ctypes.c_void_p, ctypes.c_longlong)
    (function,) = compile_functions(Source(delta_token_code.module_of, (isa, together)), {"delta_token": signature})
    return address_of(function)
