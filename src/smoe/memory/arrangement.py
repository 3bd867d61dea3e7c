"""Converts codes, scales and zero points that are separate tensors in a file to the blocks of a quantized matrix in a
slot.

    file   | codes ... | scales ... | zero points ... |
    slot   | scale, zero point, codes | scale, zero point, codes | ...         row after row of outputs

Tensors are read in chunks, and the bytes of each chunk are written to their positions in the slot. Codes keep their
bits. Scales become float32, which is exact. Matrices that a file stores by input instead of output are transposed.
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
"""The dtypes that scales have in files. The last one, which has only an exponent, is for 8-bit floats."""
_POWERS = np.concatenate([np.exp2(np.arange(255) - 127.0), [np.nan]]).astype(np.float32)
"""The value of each scale that is an 8-bit exponent."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For AWQ: where a 32-bit word stores the codes of eight consecutive outputs, counted from its lowest bits."""
_AWQ_LOWER, _AWQ_UPPER = (0, 4, 1, 5), (2, 6, 3, 7)
"""The inverse of `_AWQ_ORDER`: the outputs whose codes are in the lower and in the upper halves of a word's bytes."""


class SlotArrangement(Protocol):
    """The conversion of one stored tensor into the blocks of a slot."""

    @property
    def unit(self) -> int:
        """The number of bytes that can be converted alone: each chunk of the tensor must be a multiple of it."""

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        """Convert `source`, a chunk of the tensor from its byte `begin` on, and write the result into `slot`. `target`:
        the offset of the tensor's field in the first block of the matrix."""


@dataclass(frozen=True)
class Spread:
    """A copy of a stored tensor into the blocks of a slot, without conversion. Every `width` bytes of the tensor go to
    the beginning of the next `stride` bytes of the slot."""

    width: int
    stride: int

    @property
    def unit(self) -> int:
        return self.width

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        """Copy all blocks of `source` in one call, without the interpreter lock. This takes 1.1 ms for an expert of 13
        MB, a tenth of the time of reading it."""
        items = source.view(f"V{self.width}")
        target += begin // self.width * self.stride
        np.ndarray(items.shape, items.dtype, slot, target, (self.stride,))[:] = items


@dataclass(frozen=True)
class BlockGrid:
    """The dimensions of a matrix that consists of quantized blocks in a slot."""

    rows: int
    blocks: int
    """The number of blocks per row."""
    stride: int
    """The number of bytes per block."""

    def of_rows(self, kind: str, slot: memoryview, target: int, row: int, rows: int) -> npt.NDArray[Any]:
        """Return a view of one field of all blocks in `rows` rows from `row` on: [rows, blocks]. `kind`: the field's
        NumPy type; `target`: the field's offset in the first block."""
        row_bytes = self.blocks * self.stride
        return np.ndarray((rows, self.blocks), kind, slot, target + row * row_bytes, (row_bytes, self.stride))

    def of_blocks(self, kind: str, slot: memoryview, target: int, block: int, blocks: int) -> npt.NDArray[Any]:
        """Return a view of one field of `blocks` blocks from `block` on in all rows: [rows, blocks]. `kind`: the
        field's NumPy type; `target`: the field's offset in the first block."""
        strides = (self.blocks * self.stride, self.stride)
        return np.ndarray((self.rows, blocks), kind, slot, target + block * self.stride, strides)


@dataclass(frozen=True)
class StoredScales:
    """The conversion of scales, which a file stores as [R, C], or as [C, R] if `is_turned`. Each scale belongs to
    several rows and blocks of the matrix."""

    grid: BlockGrid
    kind: str
    """The dtype, one of `SCALE_KINDS`."""
    shape: tuple[int, int]
    """The shape in the file."""
    rows_each: int = 1
    """The number of rows of the matrix to which one scale belongs; the last scale may have fewer."""
    blocks_each: int = 1
    is_turned: bool = False
    zero: int | None = None
    """A zero point that is written after the scale of every block; None if zero points are stored or absent."""
    is_divisor: bool = False
    """Whether codes are divided by the stored scales; otherwise they are multiplied."""

    @property
    def unit(self) -> int:
        return self.shape[1] * ITEM_BYTES[self.kind]

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        found = _as_float32(source, self.kind).reshape(-1, self.shape[1])
        if self.is_divisor:
            with np.errstate(divide="ignore"):  # infinite scales are detected when the expert is first read
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
    """The conversion of zero points. A file stores them packed in 32-bit words, like codes: [K / G, N / 8] if
    `is_turned`, else [N / 8, K / G] with eight rows in each word. The matrix is [N, K] with groups of G columns."""

    grid: BlockGrid
    bits: int
    width: int
    """The number of words per stored row."""
    is_turned: bool
    blocks_each: int = 1
    is_awq: bool = False
    less: int = 0
    """The number by which the stored zero points are too small (1 in GPTQ's first version).

    GPTQ's package subtracts it from whole words, so a zero point of 0 borrows from its neighbour. Adding it to whole
    words reverses that.
    """

    @property
    def unit(self) -> int:
        return 4 * self.width

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        first, words = begin // self.unit, source.view("<u4").reshape(-1, self.width)
        if self.less:
            words = words + np.uint32(self.less * every_code(self.bits))
        codes = _codes(words, self.bits, self.is_awq)  # [stored rows, words, codes per word]
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
    """The conversion of bytes that hold two neighbouring 4-bit codes each. In the result, each byte holds one code of
    either of two groups of 16 codes."""

    numbers: int
    """The number of elements per block."""
    stride: int
    """The number of bytes per block."""

    @property
    def unit(self) -> int:
        return self.numbers // 2

    def put(self, source: Bytes, slot: memoryview, target: int, begin: int) -> None:
        """Convert eight codes at a time as whole words, in a quarter of the time that single bytes would take."""
        apart = source.astype("<u2")
        apart |= apart << 4
        apart &= 0x0F0F  # one code per byte
        groups = apart.view("<u8").reshape(-1, 2, 2)  # [32 elements, group, eight codes]
        joined = np.empty((len(groups), 2), "<u8")
        for half in range(2):  # a loop: one expression would iterate over two words only
            np.left_shift(groups[:, 1, half], 4, out=joined[:, half])
            joined[:, half] |= groups[:, 0, half]
        Spread(self.unit, self.stride).put(joined.reshape(-1).view("u1"), slot, target, begin)


@dataclass(frozen=True)
class TurnedWords:
    """The conversion of GPTQ's codes [K / 8, N]. Each 32-bit word has eight codes of one output, in the order that a
    block in a slot needs."""

    grid: BlockGrid
    words: int
    """The number of words per block."""

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
    """The conversion of AWQ's 4-bit codes [K, N / 8]: each 32-bit word has one code of each of eight outputs."""

    grid: BlockGrid
    numbers: int
    """The number of elements per block."""

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
    """Return a 32-bit word in which every code of `bits` bits is 1."""
    return ((1 << 32) - 1) // ((1 << bits) - 1)


def _as_float32(source: Bytes, kind: str) -> npt.NDArray[np.float32]:
    if kind == "F8_E8M0":
        return _POWERS[source]
    if kind == "BF16":
        return (source.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return source.view("<f4" if kind == "F32" else "<f2").astype(np.float32, copy=False)


def _codes(words: npt.NDArray[np.uint32], bits: int, is_awq: bool) -> Bytes:
    """Unpack words [..., words] to codes [..., words, codes per word], in the order of the outputs or columns."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    if is_awq:
        shifts = shifts[list(_AWQ_ORDER)]
    return ((words[..., None] >> shifts) & np.uint32((1 << bits) - 1)).astype(np.uint8)
