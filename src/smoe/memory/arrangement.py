"""How stored tensors become the blocks of a quantised matrix, where its codes, scales and zero points lie in tensors of
their own.

    file   | codes ... | scales ... | zero points ... |
    slot   | scale, zero point, codes | scale, zero point, codes | ...       row after row of outputs

Each tensor comes in pieces, whose bytes go to their places in the slot; the bits of codes never change, scales become
float32, which is exact. Some packages keep matrices input by input: they are turned on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from smoe.formats.released import SCALE_BYTES
from smoe.memory.safetensors_index import ITEM_BYTES

Bytes = npt.NDArray[np.uint8]
SCALE_KINDS = ("F32", "BF16", "F16", "F8_E8M0")
"""Types that scales may have in a file; the last, exponents alone, those of numbers of eight bits."""
_POWERS = np.concatenate([np.exp2(np.arange(255) - 127.0), [np.nan]]).astype(np.float32)
"""What a scale of eight bits, an exponent alone, stands for."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: which codes of a word, counted from its lowest bits, belong to eight outputs that follow each other."""
_AWQ_LOWER, _AWQ_UPPER = (0, 4, 1, 5), (2, 6, 3, 7)
"""The other way round: to which of eight outputs the lower halves of a word's bytes belong, and the upper ones."""


class SlotArrangement(Protocol):
    """Where the bytes of one stored tensor belong in a slot."""

    @property
    def unit(self) -> int:
        """Bytes that must come together: pieces are whole numbers of them."""

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        """Write what `source`, the tensor's bytes from `begin` on, becomes; `target`: where its first block has it."""


@dataclass(frozen=True)
class Spread:
    """Bytes in the matrix's own order: every `width` of them to the next `stride` bytes."""

    width: int
    stride: int

    @property
    def unit(self) -> int:
        return self.width

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        """Copy the blocks by one call without the interpreter lock: 1.1 ms for an expert of 13 MB, a tenth of what
        reading it takes."""
        items = source.view(f"V{self.width}")
        target += begin // self.width * self.stride
        np.ndarray(items.shape, items.dtype, slot, target, (self.stride,))[:] = items


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of a matrix in a slot."""

    rows: int
    blocks: int
    """Blocks of a row."""
    stride: int
    """Bytes of a block."""

    def of_rows(self, kind: str, slot: memoryview, target: int, row: int, rows: int) -> npt.NDArray[Any]:
        """What every block of some rows has at one place, [rows, blocks]."""
        row_bytes = self.blocks * self.stride
        return np.ndarray((rows, self.blocks), kind, slot, target + row * row_bytes, (row_bytes, self.stride))

    def of_blocks(self, kind: str, slot: memoryview, target: int, block: int, blocks: int) -> npt.NDArray[Any]:
        """What some blocks of every row have at one place, [rows, blocks]."""
        strides = (self.blocks * self.stride, self.stride)
        return np.ndarray((self.rows, blocks), kind, slot, target + block * self.stride, strides)


@dataclass(frozen=True)
class StoredScales:
    """Scales [R, C], each for so many rows and blocks; [C, R] where `is_turned`."""

    grid: BlockGrid
    kind: str
    """One of `SCALE_KINDS`."""
    shape: tuple[int, int]
    """As stored."""
    rows_each: int = 1
    """Rows of the matrix that share one; the last may have fewer."""
    blocks_each: int = 1
    is_turned: bool = False
    zero: int | None = None
    """What every block has behind its scale, where that is the same for all."""
    is_divisor: bool = False
    """Stored is what numbers are divided by."""

    @property
    def unit(self) -> int:
        return self.shape[1] * ITEM_BYTES[self.kind]

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        found = _as_float32(source, self.kind).reshape(-1, self.shape[1])
        if self.is_divisor:
            with np.errstate(divide="ignore"):  # what is infinite then is found when the expert is first read
                found = np.reciprocal(found)
        first = begin // self.unit
        if self.is_turned:
            self._put_turned(found, slot, target, first)
            return
        row = first * self.rows_each
        rows = min(len(found) * self.rows_each, self.grid.rows - row)
        every_row = np.repeat(found, self.rows_each, axis=0)[:rows]
        self.grid.of_rows("<f4", slot, target, row, rows)[:] = np.repeat(every_row, self.blocks_each, axis=1)
        if self.zero is not None:
            self.grid.of_rows("u1", slot, target + SCALE_BYTES, row, rows)[:] = self.zero

    def _put_turned(self, found: npt.NDArray[np.float32], slot: memoryview, target: int, first: int) -> None:
        block, blocks = first * self.blocks_each, len(found) * self.blocks_each
        self.grid.of_blocks("<f4", slot, target, block, blocks)[:] = np.repeat(found, self.blocks_each, axis=0).T
        if self.zero is not None:
            self.grid.of_blocks("u1", slot, target + SCALE_BYTES, block, blocks)[:] = self.zero


@dataclass(frozen=True)
class Zeros:
    """Zero points, packed in words of 32 bits as the codes are: [K / G, N / 8] where `is_turned`, else [N / 8, K / G]
    with eight rows in a word."""

    grid: BlockGrid
    bits: int
    width: int
    """Words of a stored row."""
    is_turned: bool
    blocks_each: int = 1
    is_awq: bool = False
    less: int = 0
    """What is stored is so much less than the zero point (GPTQ's first form); its package subtracts that from whole
    words, so that a zero point of 0 takes one from its neighbour, and so is it added here."""

    @property
    def unit(self) -> int:
        return 4 * self.width

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        first, words = begin // self.unit, source.view("<u4").reshape(-1, self.width)
        if self.less:
            words = words + np.uint32(self.less * every_code(self.bits))
        codes = _codes(words, self.bits, self.is_awq)  # [stored rows, words, codes of a word]
        if self.is_turned:
            every = np.repeat(codes.reshape(len(words), -1), self.blocks_each, axis=0)
            self.grid.of_blocks("u1", slot, target, first * self.blocks_each, len(every))[:] = every.T
            return
        each = 32 // self.bits
        rows = min(len(words) * each, self.grid.rows - first * each)
        found = codes.transpose(0, 2, 1).reshape(-1, self.width)[:rows]
        self.grid.of_rows("u1", slot, target, first * each, rows)[:] = np.repeat(found, self.blocks_each, axis=1)


@dataclass(frozen=True)
class PairsApart:
    """Codes of four bits, two neighbours a byte, of groups of 16: a byte of the slot has one of each of two groups."""

    numbers: int
    """Numbers of a block."""
    stride: int
    """Bytes of a block."""

    @property
    def unit(self) -> int:
        return self.numbers // 2

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        """Copy codes by whole words, eight codes at a time: a quarter of what it takes byte by byte."""
        apart = source.astype("<u2")
        apart |= apart << 4
        apart &= 0x0F0F  # a code each byte
        groups = apart.view("<u8").reshape(-1, 2, 2)  # [of 32 numbers, group, eight codes]
        joined = np.empty((len(groups), 2), "<u8")
        for half in range(2):  # neither in one: the loop would go over two words
            np.left_shift(groups[:, 1, half], 4, out=joined[:, half])
            joined[:, half] |= groups[:, 0, half]
        Spread(self.unit, self.stride).put(joined.reshape(-1).view("u1"), slot, target, begin)


@dataclass(frozen=True)
class TurnedWords:
    """GPTQ's codes [K / 8, N]: words of 32 bits with the codes of one output, as blocks have them."""

    grid: BlockGrid
    words: int
    """Words of a block."""

    @property
    def unit(self) -> int:
        return 4 * self.words * self.grid.rows

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        found = source.view("<u4").reshape(-1, self.words, self.grid.rows)
        strides = (self.grid.blocks * self.grid.stride, self.grid.stride, 4)
        target += begin // self.unit * self.grid.stride
        np.ndarray((self.grid.rows, *found.shape[:2]), "<u4", slot, target, strides)[:] = found.transpose(2, 0, 1)


@dataclass(frozen=True)
class TurnedCodes:
    """AWQ's codes of four bits [K, N / 8]: words with the codes of eight outputs."""

    grid: BlockGrid
    numbers: int
    """Numbers of a block."""

    @property
    def unit(self) -> int:
        return self.numbers * self.grid.rows // 2

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        rows = source.reshape(-1, 2, self.grid.rows // 2)
        first, second = rows[:, 0], rows[:, 1]
        block, count = begin // self.unit, len(source) // self.unit
        row_bytes = self.grid.blocks * self.grid.stride
        shape = (self.grid.rows // 8, count, self.numbers // 2)
        strides = (8 * row_bytes, self.grid.stride, 1)
        for outputs, pairs in (
            (_AWQ_LOWER, first & 15 | second << 4),
            (_AWQ_UPPER, first >> 4 | second & np.uint8(240)),
        ):
            of_words = pairs.reshape(count, self.numbers // 2, -1, 4)
            for n, output in enumerate(outputs):
                at = target + block * self.grid.stride + output * row_bytes
                np.ndarray(shape, "u1", slot, at, strides)[:] = of_words[..., n].transpose(2, 0, 1)


def every_code(bits: int) -> int:
    """A word of 32 bits in which every code is 1."""
    return ((1 << 32) - 1) // ((1 << bits) - 1)


def _as_float32(source: Bytes, kind: str) -> npt.NDArray[np.float32]:
    if kind == "F8_E8M0":
        return _POWERS[source]
    if kind == "BF16":
        return (source.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return source.view("<f4" if kind == "F32" else "<f2").astype(np.float32, copy=False)


def _codes(words: npt.NDArray[np.uint32], bits: int, is_awq: bool) -> Bytes:
    """[..., words] -> [..., words, codes of a word] in the order of what they belong to."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    if is_awq:
        shifts = shifts[list(_AWQ_ORDER)]
    return ((words[..., None] >> shifts) & np.uint32((1 << bits) - 1)).astype(np.uint8)
