"""A quantised format as a value: blocks of numbers, of equal size in bytes, one behind the other along a row.

    block            | scale | minimum | scales of groups | codes .............................. |
    number           = scale * (group's scale) * (code - zero)  -  minimum * (group's minimum)

Where a code lies is declared in *fields*, bits of one byte; the codes of neighbouring numbers, or of every second one,
lie in neighbouring bytes. Or several neighbouring numbers are a point of a grid, found by one index (`grids.py`).
Nothing here computes but `decode`, the reference: kernels are generated from the same values
(`kernels/quantised.py`), and tests hold both to the decoders of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from smoe.formats.grids import Grid

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


_NAN8 = 127
"""A code of E4M3 that is no number, but for its sign."""


def _float8() -> Floats:
    """What the 256 codes of E4M3 (OCP 8-bit Floating Point Specification, version 1.0) stand for."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7) / 8
    size = np.where(exponent == 0, np.ldexp(mantissa, -6), np.ldexp(1 + mantissa, exponent - 7))
    size[code & 127 == _NAN8] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


FLOAT8 = _float8()


class Field(NamedTuple):
    """Some bits of a byte: (byte >> shift & mask) << left. A code is the sum of its fields."""

    byte: int
    shift: int = 0
    mask: int = 255
    left: int = 0


class Bits(NamedTuple):
    """One bit for each number, eight to a byte, lowest first, from `byte` on: bit << left."""

    byte: int
    left: int


class Points(NamedTuple):
    """Numbers that are points of a grid, whole numbers with a sign of their own; the only field of a run of 16."""

    grid: Grid
    indices: tuple[tuple[Field, ...], ...]
    """Of every point."""
    signs: tuple[tuple[Field, ...], ...] = ()
    """For every eight numbers a byte, the first number's bit lowest; where it is set, the number is negative."""
    has_even_signs: bool = False
    """Signs have seven bits: the eighth is set where an odd number of them is."""


class Run(NamedTuple):
    """Some numbers from `first` on; the fields of number `first + i * step` lie `i` bytes behind those of the first."""

    first: int
    numbers: int
    fields: tuple[Field | Bits | Points, ...]
    step: int = 1


class Group(NamedTuple):
    """Numbers with a scale of their own."""

    runs: tuple[Run, ...]
    scale: tuple[Field, ...] = ()
    """Its code, which multiplies the block's scale; none: 1."""
    minimum: tuple[Field, ...] = ()
    """Its code, which multiplies the block's minimum; none: 1 where the block has a minimum."""


class Scalar(NamedTuple):
    """A number of the block, times `factor`, a power of two or its negative."""

    byte: int
    kind: str = "F16"
    """F16, F32, or E8M0: one byte e for 2 ** (e - 127); ONE: no byte, 1."""
    factor: float = 1
    fields: tuple[Field, ...] = ()
    """Of F16: where its bits lie, if not next to each other."""

    @property
    def nbytes(self) -> int:
        return {"F16": 2, "F32": 4, "E8M0": 1, "ONE": 0}[self.kind]


@dataclass(frozen=True)
class Format:
    """One quantised format."""

    name: str
    """As files have it, where they have one."""
    numbers: int
    """Of one block."""
    nbytes: int
    """Of one block."""
    scale: Scalar
    groups: tuple[Group, ...]
    minimum: Scalar | None = None
    zero: int = 0
    """What is subtracted from a code."""
    is_signed: bool = False
    """Codes are signed bytes."""
    is_float8: bool = False
    """Codes are numbers of 8 bits, E4M3 without infinities: sign, four bits of exponent, three of mantissa."""
    reals: str = ""
    """Codes are numbers of this type, F32, F16 or BF16, one behind the other: not quantised (`plain.py`)."""
    table: tuple[float, ...] | None = None
    """What the codes stand for, where it is not themselves."""
    scale_zero: int = 0
    """What is subtracted from a group's scale code."""
    has_signed_scales: bool = False
    """Groups' scale codes are signed bytes."""
    has_float8_scales: bool = False
    """Groups' scale codes are numbers of 8 bits, as `is_float8` says it."""

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The block's own numbers: its scale, and its minimum where it has one."""
        return (self.scale,) if self.minimum is None else (self.scale, self.minimum)

    @property
    def most(self) -> int:
        """The largest code, as its bits have it: unsigned, `zero` not subtracted; of points the largest magnitude."""
        if self.grid is not None:
            return self.grid.most
        fields = [field for field in self.groups[0].runs[0].fields if not isinstance(field, Points)]
        return sum((1 if isinstance(field, Bits) else field.mask) << field.left for field in fields)

    @property
    def grid(self) -> Grid | None:
        """Of the format's points, where numbers are such."""
        field = self.groups[0].runs[0].fields[0]
        return field.grid if isinstance(field, Points) else None

    def row_bytes(self, numbers: int) -> int:
        """Bytes of a row of so many numbers, a whole number of blocks."""
        assert numbers % self.numbers == 0, (self.name, numbers)
        return numbers // self.numbers * self.nbytes

    def fits(self, numbers: int) -> bool:
        """Whether a row of so many numbers is a whole number of blocks."""
        return numbers % self.numbers == 0

    def decode(self, data: Bytes) -> Floats:
        """Reference decoder: bytes [..., n * nbytes] -> numbers [..., n * numbers]."""
        if self.reals:
            return _reals(data, self.reals)
        blocks = data.reshape(-1, self.nbytes)
        out = np.empty((len(blocks), self.numbers), np.float32)
        scale = _scalar(blocks, self.scale)
        minimum = None if self.minimum is None else _scalar(blocks, self.minimum)
        for group in self.groups:
            gain = scale * self._scale_code(blocks, group)
            offset = 0 if minimum is None else minimum * _minimum_code(blocks, group)
            for run in group.runs:
                for i in range(run.numbers):
                    out[:, run.first + i * run.step] = gain * self._value(_code(blocks, run.fields, i)) - offset
        return out.reshape(*data.shape[:-1], -1)

    def is_finite(self, data: Bytes) -> bool:
        """Whether no scale of these blocks is NaN or infinite, nor a code that is a number itself."""
        if self.reals:
            return bool(np.isfinite(_reals(data, self.reals)).all())
        blocks = data.reshape(-1, self.nbytes)
        return all(_is_finite(blocks, scalar) for scalar in self.scalars) and not self._has_nan_codes(blocks)

    def _has_nan_codes(self, blocks: Bytes) -> bool:
        """Whether a number of 8 bits, a code or a group's scale, is none."""
        if self.is_float8:
            (run,) = self.groups[0].runs
            (field,), count = run.fields, run.numbers
            assert isinstance(field, Field), self.name
        elif self.has_float8_scales:
            (field,), count = self.groups[0].scale, len(self.groups)
        else:
            return False
        return int((blocks[:, field.byte : field.byte + count] & 127).max(initial=0)) == _NAN8

    def _scale_code(self, blocks: Bytes, group: Group) -> Floats:
        if not group.scale:
            return np.ones(len(blocks), np.float32)
        code = _code(blocks, group.scale, 0)
        if self.has_float8_scales:
            return FLOAT8[code]
        if self.has_signed_scales:
            return code.astype(np.uint8).view(np.int8).astype(np.float32)
        return (code - self.scale_zero).astype(np.float32)

    def _value(self, code: npt.NDArray[Any]) -> Floats:
        if self.table is not None:
            meant: Floats = np.array(self.table, np.float32)[code]
            return meant
        if self.is_float8:
            meant8: Floats = FLOAT8[code]
            return meant8
        if self.is_signed:
            return code.astype(np.uint8).view(np.int8).astype(np.float32)
        return (code - np.int32(self.zero)).astype(np.float32)


def _reals(data: Bytes, kind: str) -> Floats:
    data = np.ascontiguousarray(data)
    if kind == "BF16":
        widened: Floats = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return widened
    return data.view("<f4" if kind == "F32" else "<f2").astype(np.float32)


def _code(blocks: Bytes, fields: Sequence[Field | Bits | Points], i: int) -> npt.NDArray[np.int32]:
    total = np.zeros(len(blocks), np.int32)
    for field in fields:
        if isinstance(field, Points):
            total += _of_point(blocks, field, i)
        elif isinstance(field, Bits):
            total += (blocks[:, field.byte + i // 8].astype(np.int32) >> i % 8 & 1) << field.left
        else:
            total += (blocks[:, field.byte + i].astype(np.int32) >> field.shift & field.mask) << field.left
    return total


def with_eighth_sign(signs: Any) -> Any:
    """Seven bits with an eighth, so that an even number of them is set; whole numbers of any kind."""
    odd = signs ^ (signs >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    return signs | ((odd & 1) << 7)


def _of_point(blocks: Bytes, points: Points, i: int) -> npt.NDArray[np.int32]:
    """Number i of those that points stand for, with its sign."""
    point, within = divmod(i, points.grid.width)
    size: npt.NDArray[np.int32] = points.grid.points[_code(blocks, points.indices[point], 0), within].astype(np.int32)
    if not points.signs:
        return size
    signs = _code(blocks, points.signs[i // 8], 0)
    if points.has_even_signs:
        signs = with_eighth_sign(signs)
    found: npt.NDArray[np.int32] = np.where(signs >> i % 8 & 1, -size, size)
    return found


def _minimum_code(blocks: Bytes, group: Group) -> Floats:
    return _code(blocks, group.minimum, 0).astype(np.float32) if group.minimum else np.ones(len(blocks), np.float32)


def _scalar(blocks: Bytes, scalar: Scalar) -> Floats:
    if scalar.kind == "E8M0":
        power: Floats = np.ldexp(np.float32(1), blocks[:, scalar.byte].astype(np.int32) - 127).astype(np.float32)
        return power
    if scalar.kind == "ONE":
        return np.ones(len(blocks), np.float32)
    kind = np.float16 if scalar.kind == "F16" else np.float32
    if scalar.fields:
        gathered = _code(blocks, scalar.fields, 0).astype(np.uint16).view(np.float16)
        return gathered.astype(np.float32) * np.float32(scalar.factor)
    stored = np.ascontiguousarray(blocks[:, scalar.byte : scalar.byte + scalar.nbytes]).view(kind)[:, 0]
    numbers: Floats = stored.astype(np.float32) * np.float32(scalar.factor)
    return numbers


def _is_finite(blocks: Bytes, scalar: Scalar) -> bool:
    if scalar.kind == "E8M0":
        return not bool((blocks[:, scalar.byte] == 255).any())
    if scalar.kind == "F32" or scalar.fields:
        return bool(np.isfinite(_scalar(blocks, scalar)).all())
    return not bool((blocks[:, scalar.byte + 1] & 0x7C == 0x7C).any())
