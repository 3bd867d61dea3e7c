"""Dequantizes matrices by torch's operations, on any device.

Each operation computes all elements of many blocks. With operations for each group of a block, a small matrix would
take ten times as long: the time is that of the calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from smoe.formats.base import Bits, Field, Format, Points, Run, Scalar, with_eighth_sign

_REALS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PART_ELEMENTS = 1 << 18
"""The number of elements that are computed at a time, which bounds the memory for intermediate results to some MB."""


def unpacked(form: Format, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a quantized matrix, uint8 [rows, bytes], as `dtype` [rows, elements]. It is computed in float32 and
    rounded once."""
    if form.reals:
        return data.clone(memory_format=torch.contiguous_format).view(_REALS[form.reals]).to(dtype)
    blocks = data.reshape(-1, form.nbytes)
    out = torch.empty(blocks.shape[0], form.numbers, dtype=dtype, device=data.device)
    count = PART_ELEMENTS // form.numbers
    for some, place in zip(blocks.split(count), out.split(count), strict=True):
        place.copy_(_elements(form, some).flatten(1))
    return out.view(data.shape[0], -1)


class _Positions(NamedTuple):
    """The positions of several codes in a block, by their fields: each a tensor [fields, codes]. Codes with fewer
    fields than others have empty ones."""

    byte: torch.Tensor
    shift: torch.Tensor
    mask: torch.Tensor
    left: torch.Tensor

    @classmethod
    def of(cls, codes: Sequence[Sequence[Field]], device: torch.device) -> _Positions | None:
        """Return the positions of the codes with these fields; None if there are no fields."""
        fields = max(map(len, codes), default=0)
        if fields == 0:
            return None
        padded = [[*each, *[Field(0, mask=0)] * (fields - len(each))] for each in codes]
        byte, *others = torch.tensor(padded, device=device).permute(2, 1, 0).contiguous()
        return cls(byte, *(each.int() for each in others))

    def codes(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return all these codes, int32 [blocks, codes]."""
        parts = []
        for byte, shift, mask, left in zip(*self, strict=True):
            raw = blocks.gather(1, byte.expand(blocks.shape[0], -1)).int()
            parts.append(raw.bitwise_right_shift_(shift).bitwise_and_(mask).bitwise_left_shift_(left))
        return functools.reduce(torch.Tensor.add_, parts)


class _Layout(NamedTuple):
    """The declaration of a format as tensors on a device. The elements of a group are neighbours, and all groups have
    equally many."""

    elements: _Positions
    """The codes of the elements or, in formats of grid points, the indices of the points."""
    signs: _Positions | None
    """The bytes of signs, each for eight elements; None if the format has none."""
    has_even_signs: bool
    scales: _Positions | None
    """The scale codes of the groups; None if they are all 1."""
    minimums: _Positions | None
    """The minimum codes of the groups; None if they are all 1 or the format has no minimum."""
    values: torch.Tensor | None
    """The elements of the grid's points, int32 [points, width], or the values of the codes, float32 [1, codes]; None if
    a code is its own value."""


@functools.cache
def _layout(form: Format, device: torch.device) -> _Layout:
    """Return the layout of a format, which is made once per process and device."""
    runs = sorted((run for group in form.groups for run in group.runs), key=lambda run: run.first)
    points = [field for run in runs for field in run.fields if isinstance(field, Points)]
    codes = [index for each in points for index in each.indices] or _fields(form, runs)
    elements = _Positions.of(codes, device)
    assert elements is not None, form.name
    values = None if form.table is None else torch.tensor([form.table], device=device)
    if form.grid is not None:
        values = torch.tensor(form.grid.points, dtype=torch.int32, device=device)
    return _Layout(
        elements,
        _Positions.of([byte for each in points for byte in each.signs], device),
        any(each.has_even_signs for each in points),
        _Positions.of([group.scale for group in form.groups], device),
        _Positions.of([group.minimum for group in form.groups], device),
        values,
    )


def _fields(form: Format, runs: Sequence[Run]) -> list[list[Field]]:
    """Return the fields of every element of a block."""
    found: list[list[Field]] = [[] for _ in range(form.numbers)]
    for run in runs:
        for i in range(run.numbers):
            found[run.first + i * run.step] += [_at(field, i) for field in run.fields if not isinstance(field, Points)]
    return found


def _at(field: Field | Bits, i: int) -> Field:
    """Return the bits of element number `i` of a run with this field."""
    if isinstance(field, Bits):
        return Field(field.byte + i // 8, i % 8, 1, field.left)
    return field._replace(byte=field.byte + i)


def _elements(form: Format, blocks: torch.Tensor) -> torch.Tensor:
    """Return the elements of blocks, float32 [blocks, groups, elements of a group]."""
    layout, groups = _layout(form, blocks.device), len(form.groups)
    gain = _scalar(blocks, form.scale)
    if layout.scales is not None:
        gain = gain * _scales(form, layout.scales.codes(blocks))
    values = _values(form, layout, blocks).view(-1, groups, form.numbers // groups) * gain.unsqueeze(2)
    if form.minimum is None:
        return values
    offset = _scalar(blocks, form.minimum)
    if layout.minimums is not None:
        offset = offset * layout.minimums.codes(blocks).float()
    return values.sub_(offset.unsqueeze(2))


def _values(form: Format, layout: _Layout, blocks: torch.Tensor) -> torch.Tensor:
    """Return the values of the elements' codes, float32 [blocks, elements]."""
    codes = layout.elements.codes(blocks)
    if form.grid is not None:
        codes = _of_points(form, layout, codes, blocks)
    elif layout.values is not None:
        return layout.values.expand(blocks.shape[0], -1).gather(1, codes.long())
    if form.is_float8:
        return _float8(codes)
    if form.is_signed:
        return codes.to(torch.uint8).view(torch.int8).float()
    return (codes - form.zero).float()


def _of_points(form: Format, layout: _Layout, indices: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the elements of grid points (a codebook of short vectors), with their signs applied."""
    assert layout.values is not None, form.name
    sizes = layout.values[indices].flatten(1)
    if layout.signs is None:
        return sizes
    signs = layout.signs.codes(blocks).unsqueeze(2)
    if layout.has_even_signs:
        signs = with_eighth_sign(signs)
    is_negative = (signs >> torch.arange(8, dtype=torch.int32, device=blocks.device) & 1).flatten(1).bool()
    return torch.where(is_negative, -sizes, sizes)


def _scales(form: Format, codes: torch.Tensor) -> torch.Tensor:
    """Return the values of the groups' scale codes."""
    if form.has_signed_scales:
        codes = codes.to(torch.uint8).view(torch.int8).int()
    if form.has_float8_scales:
        return _float8(codes)
    return (codes - form.scale_zero).float()


def _float8(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _scalar(blocks: torch.Tensor, scalar: Scalar) -> torch.Tensor:
    """Return a scalar of every quantized block, for example its scale, as float32 [blocks, 1]."""
    if scalar.kind == "E8M0":
        exponents = blocks[:, scalar.byte : scalar.byte + 1].int()
        return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
    if scalar.fields:
        raw = [(blocks[:, field.byte : field.byte + 1].int(), field) for field in scalar.fields]
        bits = sum((byte >> field.shift & field.mask) << field.left for byte, field in raw)
        assert isinstance(bits, torch.Tensor), scalar
        return bits.to(torch.int16).view(torch.float16).float() * scalar.factor
    kind = torch.float16 if scalar.kind == "F16" else torch.float32
    stored = blocks[:, scalar.byte : scalar.byte + scalar.nbytes].contiguous().view(kind)
    return stored.float() * scalar.factor
