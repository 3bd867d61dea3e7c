"""Attention of a prompt's tokens over a KV cache in bf16, in tiles, with sums in an order of our own (grade E1).

A key head's queries are rows: of every position those of all query heads that share its keys. A block of rows lies
across the lanes of registers, so scores need no sums within a register, and every row's numbers stay in one lane:

    block of 128 keys    packed once for several blocks of rows; values in pairs of keys where bf16 has dot products
      scores             S[key, row] = k . q             tiles of 8 keys x 3 registers of rows
      softmax            P[key, row] = exp(S - largest)  what there is so far is scaled by exp(old - new largest)
      values             O[d, row]  += v . P             tiles of 8 numbers x 3 registers of rows

Both products are one routine: a number of the cache, copied to all lanes, times registers of rows. Blocks of keys are
counted from the text's first position, and a key in a row's future adds zero, so a row's bits depend on itself and its
keys alone: not on what other rows are there, on how a prompt is cut into pieces, or on who computes it. Without dot
products of bf16 numbers the same is done in float32, into which keys and values are widened as they are packed.

Where they are, weights are rounded to bf16, as the library rounds them, and their sum is that of the rounded ones: what
rounding adds to all of them alike cancels out. That the error is no larger than the library's is proven before use
(`fastpath/prompt_attention.py`). Figures in docs/log/kernels.md.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct

import torch

from smoe.kernels.isa import Isa, widest
from smoe.kernels.jit import Source, address_of, compile_functions
from smoe.kernels.prompt_layout import FIELDS, LINE, NAME, PromptLayout
from smoe.kernels.spinning_pool import SpinningPool
from smoe.kernels.tile import TILE

MOST_VECTORS = 3
"""Registers of rows in a block; with 8 keys or numbers 24 running sums, or with 4 of them 12, fill all registers."""
_MOST_BLOCKS = 8
"""Blocks of rows of a unit: they share what is packed, and their outputs stay in the second cache level."""
_UNITS_A_THREAD = 4
"""So many at least, where there are rows enough: those at a prompt's end take longest."""
_WAKING_PRODUCTS = 1 << 23
"""Fewer products of a query's with a key's number take less time than waking a sleeper."""


def fits(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether query [1, heads, m, size] and K, V [1, key heads, n, size] are of a kind that the kernel knows."""
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
    """Attention of the last m of n positions, on the threads of a pool, one call at a time."""

    def __init__(self, pool: SpinningPool, isa: Isa | None = None) -> None:
        """`isa`: the instruction set; the widest of this CPU where none is given."""
        self._pool = pool
        self._isa = isa or widest()
        self._memory = bytearray()

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """[1, m, heads, size], of tensors as in `fits`: the first row attends to n - m + 1 keys, the next one more."""
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
        """Of these blocks of rows, how many are a unit."""
        return max(1, min(_MOST_BLOCKS, blocks * key_heads // (_UNITS_A_THREAD * self._pool.threads)))

    def _scratch(self, stride: int) -> int:
        """The address of a word that is zero, and a line behind it `stride` bytes for every thread."""
        need = stride * self._pool.threads + 2 * LINE
        if need > len(self._memory):
            self._memory = bytearray(need)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        begin = -(-begin // LINE) * LINE
        ctypes.c_int64.from_address(begin).value = 0
        return begin


@functools.cache
def compiled(isa: Isa, size: int, vectors: int) -> int:
    """The kernel's address, made once a process."""
    from smoe.kernels import prompt_tiles  # needs llvmlite, which not every machine has

    signature = (ctypes.c_void_p, ctypes.c_longlong)
    (function,) = compile_functions(Source(prompt_tiles.module_of, (isa, size, vectors)), {NAME: signature})
    return address_of(function)
