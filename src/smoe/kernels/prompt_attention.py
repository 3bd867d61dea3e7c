"""Computes attention of a prompt's tokens over a bf16 KV cache, in tiles, with our own order of sums (grade E1).

The queries of a key head are *rows*: for every position, those of all query heads that share the key head. A block of
rows is spread over the lanes of registers. So scores need no sums within a register, and each row's numbers stay in one
lane:

    block of 128 keys    packed once for several blocks of rows; values in pairs of keys with bf16 dot products
        scores           S[key, row] = k . q               tiles of 8 keys x 3 registers of rows
        softmax          P[key, row] = exp(S - largest)    earlier outputs are multiplied by exp(old - new largest)
        values           O[d, row]  += v . P               tiles of 8 elements x 3 registers of rows

Both products use one routine: a number of the cache, copied to all lanes, times registers of rows. Blocks of keys are
counted from the text's first position, and keys in a row's future add zero. So a row's bits depend only on the row and
its keys: not on other rows, on the chunks of a prompt, or on the thread.

Without bf16 dot products everything is computed in float32; keys and values are converted while they are packed. With
bf16 dot products, weights are rounded to bf16, as torch does, and their sum is that of the rounded weights, so that a
common rounding error cancels out. Before the kernel is used, its error is compared with torch's
(`fastpath/prompt_attention.py`). Measurements are in docs/log/kernels.md.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct

import torch

from smoe.kernels.attention import TILE
from smoe.kernels.isa import Isa, widest
from smoe.kernels.jit import Source, address_of, compile_functions
from smoe.kernels.prompt_layout import FIELDS, LINE, NAME, PromptLayout
from smoe.kernels.spinning_pool import SpinningPool

MOST_VECTORS = 3
"""The number of registers of rows in a block. Together with 8 keys (or 4) they make 24 (or 12) running sums, which fill
all registers."""
_MOST_BLOCKS = 8
"""The largest number of blocks in a unit, the work that a thread takes at a time. The blocks share packed keys, and
their outputs stay in the second-level cache."""
_UNITS_A_THREAD = 4
"""The least number of units per thread, if there are enough rows. (Rows at the end of a prompt take longest.)"""
_WAKING_PRODUCTS = 1 << 23
"""The number of multiplications below which one thread is faster than waking others that sleep."""


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether the prompt attention kernel supports these tensors: query [1, heads, m, size], keys and values [1,
    key heads, n, size]."""
    tensors = query, keys, values
    rows, heads, tokens, size = query.shape
    return (
        rows == 1
        and keys.shape == values.shape
        and keys.shape[0] == 1
        and 0 < tokens <= keys.shape[2]
        and keys.shape[3] == size
        and size % TILE == 0
        and heads % keys.shape[1] == 0
        and all(t.dtype is torch.bfloat16 and t.device.type == "cpu" and t.stride(3) == 1 for t in tensors)
    )


class PromptAttention:
    """Computes attention of the last m of n positions on the threads of a pool, one call at a time."""

    def __init__(self, pool: SpinningPool, isa: Isa | None = None) -> None:
        """`isa`: the instruction set of the kernel; None: the widest of this CPU."""
        self._pool = pool
        self._isa = isa or widest()
        self._memory = bytearray()

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention [1, m, heads, size] for tensors as in `fits`.

        The first position attends to n - m + 1 keys, each following position to one more.
        """
        heads, tokens, size = query.shape[1:]
        key_heads, count = keys.shape[1:3]
        isa = self._isa
        assert isa is not None, "made on a CPU without an instruction set that is known"
        rows = tokens * (heads // key_heads)
        layout = PromptLayout(isa, size, MOST_VECTORS if rows > 2 * isa.lanes else 1)
        blocks = self._blocks(-(-rows // layout.width), key_heads)
        units = key_heads * -(-rows // (layout.width * blocks))
        out, stride = query.new_empty(1, tokens, heads, size), layout.nbytes(blocks)
        scratch = self._scratch(stride)
        (scale_bits,) = struct.unpack("I", struct.pack("f", scale * math.log2(math.e)))
        strides = [2 * each for t in (query, keys, values) for each in t.stride()[1:3]]
        fields = (*(t.data_ptr() for t in (query, keys, values, out)), *strides, rows, heads // key_heads, key_heads,
                  count - tokens, blocks, units, scale_bits, scratch + LINE, stride, scratch)  # fmt: skip
        assert len(fields) == len(FIELDS), f"{len(fields)} fields of {len(FIELDS)}"
        function = compiled(layout.isa, layout.size, layout.vectors)
        is_long = heads * tokens * count * size >= _WAKING_PRODUCTS
        self._pool.share(function, fields, min(self._pool.threads, units), is_long)
        return out

    def _blocks(self, blocks: int, key_heads: int) -> int:
        """Return the number of blocks of query rows that a thread computes at a time."""
        return max(1, min(_MOST_BLOCKS, blocks * key_heads // (_UNITS_A_THREAD * self._pool.threads)))

    def _scratch(self, stride: int) -> int:
        """Return the address of scratch memory: a zeroed counter in the first cache line, and then `stride` bytes for
        every thread."""
        need = stride * self._pool.threads + 2 * LINE
        if need > len(self._memory):
            self._memory = bytearray(need)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        begin = -(-begin // LINE) * LINE
        ctypes.c_int64.from_address(begin).value = 0
        return begin


@functools.cache
def compiled(isa: Isa, size: int, vectors: int) -> int:
    """Return the address of the prompt attention kernel for heads of `size` elements and blocks of `vectors` registers.
    The kernel of each combination is compiled once per process."""
    from smoe.kernels import prompt_tiles  # requires llvmlite, which is optional

    signature = (ctypes.c_void_p, ctypes.c_longlong)
    (function,) = compile_functions(Source(prompt_tiles.module_of, (isa, size, vectors)), {NAME: signature})
    return address_of(function)
