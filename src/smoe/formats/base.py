"""The declaration of a quantized format, as a value. A row consists of blocks that have equal numbers of elements and
bytes.

    block            | scale | minimum | scales of groups | codes .............................. |
    element          = scale * (group's scale) * (code - zero)  -  minimum * (group's minimum)

A declaration says where the bits of each code are, by *fields*, which are bits of one byte. The codes of neighbouring
elements, or of every second one, are in neighbouring bytes. In other formats several neighbouring elements are a point
of a grid, which one index selects (`grids.py`). Only `decode`, the reference, computes here. Kernels are generated from
the same declarations (`kernels/quantised.py`), and tests compare both with decoders of other projects.
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


_INFINITE_HALF = 0x7C00
"""The bits of infinity in float16. Without the sign, larger numbers are NaN."""
_NAN8 = 127
"""The code of NaN in E4M3, without its sign."""


def _float8() -> Floats:
    """Return the values of the 256 codes of E4M3 (OCP 8-bit Floating Point Specification, version 1.0)."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7) / 8
    size = np.where(exponent == 0, np.ldexp(mantissa, -6), np.ldexp(1 + mantissa, exponent - 7))
    size[code & 127 == _NAN8] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


FLOAT8 = _float8()


class Field(NamedTuple):
    """A bit field of one byte of a block, with its position in a code: (byte >> shift & mask) << left. A code is the
    sum of its fields."""

    byte: int
    shift: int = 0
    mask: int = 255
    left: int = 0


class Bits(NamedTuple):
    """A field with one bit per element, eight elements in a byte, the lowest bit first. It begins at `byte` and
    contributes bit << left to a code."""

    byte: int
    left: int


class Points(NamedTuple):
    """The field of elements that are points of a grid. Magnitudes come from the grid, and signs may be stored
    separately. It is the only field of a run of 16 elements."""

    grid: Grid
    indices: tuple[tuple[Field, ...], ...]
    """For every point, the fields of its index."""
    signs: tuple[tuple[Field, ...], ...] = ()
    """For every eight elements, the fields of a byte of signs. The lowest bit is the sign of the first element; a set
    bit means negative."""
    has_even_signs: bool = False
    """Whether only seven signs are stored. The eighth makes the number of negative elements even."""


class Run(NamedTuple):
    """Elements of a block whose codes are in neighbouring bytes: the elements `first`, `first + step` and so on.
    `fields` locate the code of the first element; the fields of element `first + i * step` are `i` bytes further."""

    first: int
    numbers: int
    fields: tuple[Field | Bits | Points, ...]
    step: int = 1


class Group(NamedTuple):
    """Elements of a quantized block that have a scale of their own."""

    runs: tuple[Run, ...]
    scale: tuple[Field, ...] = ()
    """The fields of the group's scale code, by which the block's scale is multiplied; empty: 1."""
    minimum: tuple[Field, ...] = ()
    """The fields of the group's minimum code, by which the block's minimum is multiplied; empty: 1 if the block has a
    minimum."""


class Scalar(NamedTuple):
    """A number of a whole block, such as its scale. Its value is multiplied by `factor`, a power of two or the negative
    of one."""

    byte: int
    kind: str = "F16"
    """The type in the file: F16, F32, E8M0 (one byte e, meaning 2 ** (e - 127)), or ONE (no byte, value 1)."""
    factor: float = 1
    fields: tuple[Field, ...] = ()
    """For an F16 whose bits are not contiguous: the fields that contain them."""

    @property
    def nbytes(self) -> int:
        return {"F16": 2, "F32": 4, "E8M0": 1, "ONE": 0}[self.kind]


@dataclass(frozen=True)
class Format:
    """A quantized format: the size of its blocks, and where scales and codes are in a block."""

    name: str
    """The name in files, if files name the format."""
    numbers: int
    """The number of elements per block."""
    nbytes: int
    """The number of bytes per block."""
    scale: Scalar
    groups: tuple[Group, ...]
    minimum: Scalar | None = None
    zero: int = 0
    """The number that is subtracted from every code."""
    is_signed: bool = False
    """Whether codes are signed bytes."""
    is_float8: bool = False
    """Whether codes are 8-bit floats, E4M3 without infinities: a sign, four bits of exponent, three of mantissa."""
    reals: str = ""
    """For unquantized, consecutive numbers (`plain.py`): their type, F32, F16 or BF16. Empty if the format is
    quantized."""
    table: tuple[float, ...] | None = None
    """The values of the codes; None if a code is its own value."""
    scale_zero: int = 0
    """The number that is subtracted from every group's scale code."""
    has_signed_scales: bool = False
    """Whether groups' scale codes are signed bytes."""
    has_float8_scales: bool = False
    """Whether groups' scale codes are 8-bit floats, as with `is_float8`."""
    rows: int = 1
    """The number of rows whose blocks are interleaved in memory (`interleaved.py`); 1 in files."""

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        """The scalars of a block: its scale, and its minimum if it has one."""
        return (self.scale,) if self.minimum is None else (self.scale, self.minimum)

    @property
    def most(self) -> int:
        """The largest code that its bits allow: unsigned, before `zero` is subtracted. For points it is the largest
        magnitude."""
        if self.grid is not None:
            return self.grid.most
        fields = [field for field in self.groups[0].runs[0].fields if not isinstance(field, Points)]
        return sum((1 if isinstance(field, Bits) else field.mask) << field.left for field in fields)

    @property
    def grid(self) -> Grid | None:
        """The grid of the format's points; None if elements are not points."""
        field = self.groups[0].runs[0].fields[0]
        return field.grid if isinstance(field, Points) else None

    def row_bytes(self, numbers: int) -> int:
        """Return the size in bytes of a row with `numbers` elements, which must be a multiple of the elements per
        block."""
        assert numbers % self.numbers == 0, (self.name, numbers)
        return numbers // self.numbers * self.nbytes

    def fits(self, numbers: int) -> bool:
        """Return whether a row with `numbers` elements consists of whole blocks."""
        return numbers % self.numbers == 0

    def decode(self, data: Bytes) -> Floats:
        """Return the values of blocks: bytes [..., n * nbytes] become numbers [..., n * numbers]. This is the reference
        decoder."""
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
        """Return whether all scales in the blocks `data` are finite and, in formats with float codes, all codes too."""
        if self.reals:
            return bool(np.isfinite(_reals(data, self.reals)).all())
        blocks = data.reshape(-1, self.nbytes)
        return _are_finite(blocks, self.scalars) and not self._has_nan_codes(blocks)

    def _has_nan_codes(self, blocks: Bytes) -> bool:
        """Return whether any 8-bit float in the blocks is NaN. Codes or scales of groups are such floats in some
        formats."""
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
    """Return seven sign bits with an eighth added, so that the number of set bits is even. `signs` may be integers of
    any type."""
    odd = signs ^ (signs >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    return signs | ((odd & 1) << 7)


def _of_point(blocks: Bytes, points: Points, i: int) -> npt.NDArray[np.int32]:
    """Return element number `i` of a run of grid points, with its sign, for every block."""
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


def _are_finite(blocks: Bytes, scalars: Sequence[Scalar]) -> bool:
    """Return whether the `scalars` of all blocks are finite, one or two numbers of each."""
    halves = [scalar for scalar in scalars if scalar.kind == "F16" and not scalar.fields]
    if len(halves) == 2 and halves[1].byte == halves[0].byte + 2:  # both at once, as one number of four bytes
        return _halves_are_finite(blocks, halves[0].byte, 4)
    return all(_is_finite(blocks, scalar) for scalar in scalars)


def _is_finite(blocks: Bytes, scalar: Scalar) -> bool:
    if scalar.kind == "E8M0":
        return not bool((blocks[:, scalar.byte] == 255).any())
    if scalar.kind == "F32" or scalar.fields:
        return bool(np.isfinite(_scalar(blocks, scalar)).all())
    return _halves_are_finite(blocks, scalar.byte, 2)


def _halves_are_finite(blocks: Bytes, first: int, nbytes: int) -> bool:
    """Return whether the float16 numbers in `nbytes` bytes of every block, from the byte `first`, are finite.

    Comparisons as integers are several times as fast: infinity and NaN are the largest of the positive numbers and, as
    numbers without sign, of the negative ones."""
    stored = np.ascontiguousarray(blocks[:, first : first + nbytes].view(f"<u{nbytes}")).view("<u2")
    return bool(stored.view("<i2").max(initial=0) < _INFINITE_HALF and stored.max(initial=0) < _INFINITE_HALF + 0x8000)
