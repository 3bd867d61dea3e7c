"""The arguments of the kernel for prompt attention, and the layout of each thread's memory."""

from __future__ import annotations

from smoe.kernels.isa import Isa

NAME = "prompt_attention"
"""The name of the kernel's main function."""
BLOCK = 128
"""The number of keys in a block of the softmax. With fewer keys, earlier outputs would be scaled more often."""
_PAD = 64
"""The number of unused bytes after each packed row. Without them, a column would map to few sets of the first-level
cache."""
LINE = 64
FIELDS = ("query", "keys", "values", "out", "query_head", "query_row", "key_head", "key_row", "value_head", "value_row",
           "rows", "shared", "key_heads", "past", "blocks", "units", "scale", "scratch", "stride", "taken")  # fmt: skip
"""The arguments of the kernel, as words of 8 bytes. In this order: addresses of query, keys, values and output;
distances in bytes between heads and between positions; the number of rows of a key head, and how many of them each
position has (`shared`); key heads; positions before the first row's; blocks of rows per unit; units; the factor of
scores for powers of two (a float32's bits); the address of scratch memory, and its bytes per thread; the address of the
counter of taken units."""
ROW_ADDRESSES = ("query", "out")
"""The names of the two addresses that are stored for each row."""


class PromptLayout:
    """The layout of a thread's memory, and the tile sizes of the computation.

    zeros | keys | values | scores | then for every block of rows: queries | outputs | state
    """

    def __init__(self, isa: Isa, size: int, vectors: int) -> None:
        self.isa, self.size, self.vectors = isa, size, vectors
        self.width = vectors * isa.lanes
        """The number of rows in a block."""
        self.line = 4 * self.width
        """The size in bytes of a line: one number of each row of a block."""
        self.step = 2 if isa.has_bf16_dots else 1
        """How many elements are multiplied at once: a 32-bit word holds two in bf16, or one in float32."""
        self.tile = 8 if isa.registers >= 32 else 4
        """The number of keys, or of elements of a head, whose running sums are in registers at the same time."""
        self.key_row = 4 * size // self.step + _PAD
        """The bytes of a packed key."""
        self.value_row = 4 * size + _PAD
        """The bytes of the packed values of `step` keys."""
        self.keys = LINE * -(-2 * size // LINE)
        """The offset of packed keys in a thread's memory. Before them are zeros, which are read in place of missing
        keys."""
        self.values = self.keys + BLOCK * self.key_row
        self.scores = self.values + BLOCK // self.step * self.value_row
        self.blocks = self.scores + BLOCK * self.line
        self.outputs = self.line * size // self.step
        """The offset of the outputs [size, rows] in a block's memory."""
        self.largest = self.outputs + self.line * size
        """The offset of the largest score so far of each row."""
        self.sums = self.largest + self.line
        self.factors = self.sums + self.line
        self.positions = self.factors + self.line
        self.addresses = self.positions + self.line
        """The offset of the addresses that `ROW_ADDRESSES` names, one per row."""
        self.block = self.addresses + len(ROW_ADDRESSES) * 2 * self.line

    def nbytes(self, blocks: int) -> int:
        """Return the bytes of memory that a thread needs for `blocks` blocks of rows."""
        return self.blocks + blocks * self.block
