"""What the kernel for attention of prompts is given, and how a thread's memory is laid out for it."""

from __future__ import annotations

from smoe.kernels.isa import Isa

NAME = "prompt_attention"
"""Of the function."""
BLOCK = 128
"""Keys whose softmax is computed together: fewer scale what there is so far more often."""
_PAD = 64
"""Bytes between packed rows: without them a column's lines would share few places of the first cache level."""
LINE = 64
FIELDS = ("query", "keys", "values", "out", "query_head", "query_row", "key_head", "key_row", "value_head", "value_row",
           "rows", "shared", "key_heads", "past", "blocks", "units", "scale", "scratch", "stride", "taken")  # fmt: skip
"""Words of 8 bytes that describe the work: addresses; strides in bytes from head to head and from position to position;
rows of a key head, of which `shared` are of each position; positions before the first row's; blocks of rows of a unit;
units; what scores are multiplied with, for powers of two (the bits of a float32); memory, `stride` bytes of which are
for each thread; the address of a word that counts units that are taken."""
ROW_ADDRESSES = ("query", "out")
"""Addresses that are known of each row."""


class PromptLayout:
    """How a thread's memory is laid out, and in which steps it is computed.

    nothing | keys | values | scores | then for every block of rows: queries | outputs | state
    """

    def __init__(self, isa: Isa, size: int, vectors: int) -> None:
        self.isa, self.size, self.vectors = isa, size, vectors
        self.width = vectors * isa.lanes
        """Rows of a block."""
        self.line = 4 * self.width
        """Bytes of a number of each."""
        self.step = 2 if isa.has_bf16_dots else 1
        """Numbers that are multiplied together: words of 32 bits hold two of bf16, or one in float32."""
        self.tile = 8 if isa.registers >= 32 else 4
        """Keys, or numbers of a head, whose running sums are in registers together."""
        self.key_row = 4 * size // self.step + _PAD
        """Bytes of a packed key, ..."""
        self.value_row = 4 * size + _PAD
        """... of `step` packed values, ..."""
        self.keys = LINE * -(-2 * size // LINE)
        """... and where in a thread's memory they lie: first are the zeros of a key that is not there."""
        self.values = self.keys + BLOCK * self.key_row
        self.scores = self.values + BLOCK // self.step * self.value_row
        self.blocks = self.scores + BLOCK * self.line
        self.outputs = self.line * size // self.step
        """Where, in a block's memory, its outputs begin, [size, rows], ..."""
        self.largest = self.outputs + self.line * size
        """... for each row its largest score so far, ..."""
        self.sums = self.largest + self.line
        self.factors = self.sums + self.line
        self.positions = self.factors + self.line
        self.addresses = self.positions + self.line
        """... and a register's worth of addresses of each of `ROW_ADDRESSES`."""
        self.block = self.addresses + len(ROW_ADDRESSES) * 2 * self.line

    def nbytes(self, blocks: int) -> int:
        """Memory of a thread for so many blocks of rows."""
        return self.blocks + blocks * self.block
