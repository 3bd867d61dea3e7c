"""The arguments of the prompt attention kernel, and the layout of a thread's memory."""

from __future__ import annotations

from smoe.kernels.isa import Isa

NAME = "prompt_attention"
"""The name of the function."""
BLOCK = 128
"""The number of keys per block of the softmax: with fewer, earlier outputs are scaled more often."""
_PAD = 64
"""The number of bytes between packed rows; without them, a column would map to few sets of the first cache level."""
LINE = 64
FIELDS = ("query", "keys", "values", "out", "query_head", "query_row", "key_head", "key_row", "value_head", "value_row",
           "rows", "shared", "key_heads", "past", "blocks", "units", "scale", "scratch", "stride", "taken")  # fmt: skip
"""The arguments as words of 8 bytes: addresses; strides in bytes between heads and between positions; rows of a key
head, `shared` of them per position; positions before the first row's; blocks of rows per unit; units; the factor of
scores for powers of two (a float32's bits); memory, `stride` bytes per thread; the address of the counter of taken
units."""
ROW_ADDRESSES = ("query", "out")
"""The names of the addresses that are stored for each row."""


class PromptLayout:
    """The layout of a thread's memory, and the tile sizes of the computation.

    zeros | keys | values | scores | then for every block of rows: queries | outputs | state
    """

    def __init__(self, isa: Isa, size: int, vectors: int) -> None:
        self.isa, self.size, self.vectors = isa, size, vectors
        self.width = vectors * isa.lanes
        """The number of rows per block."""
        self.line = 4 * self.width
        """The size in bytes of one number of each row."""
        self.step = 2 if isa.has_bf16_dots else 1
        """The number of numbers that are multiplied together: a 32-bit word holds two in bf16, or one in float32."""
        self.tile = 8 if isa.registers >= 32 else 4
        """Keys, or elements of a head, whose running sums are in registers together."""
        self.key_row = 4 * size // self.step + _PAD
        """The size in bytes of a packed key."""
        self.value_row = 4 * size + _PAD
        """The size in bytes of `step` packed values."""
        self.keys = LINE * -(-2 * size // LINE)
        """The offset of packed keys in a thread's memory, after the zeros that replace missing keys."""
        self.values = self.keys + BLOCK * self.key_row
        self.scores = self.values + BLOCK // self.step * self.value_row
        self.blocks = self.scores + BLOCK * self.line
        self.outputs = self.line * size // self.step
        """The offset, in a block's memory, of the outputs [size, rows]."""
        self.largest = self.outputs + self.line * size
        """The offset of each row's largest score so far."""
        self.sums = self.largest + self.line
        self.factors = self.sums + self.line
        self.positions = self.factors + self.line
        self.addresses = self.positions + self.line
        """The offset of the addresses in `ROW_ADDRESSES`, one per row."""
        self.block = self.addresses + len(ROW_ADDRESSES) * 2 * self.line

    def nbytes(self, blocks: int) -> int:
        """Return the bytes of memory per thread for `blocks` blocks of rows."""
        return self.blocks + blocks * self.block
