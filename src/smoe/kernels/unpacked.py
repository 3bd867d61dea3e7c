"""Dequantizes matrices by torch's operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from smoe.formats.base import Bits, Field, Format, Group, Points, Scalar, with_eighth_sign

_REALS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def unpacked(form: Format, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a quantized matrix, uint8 [rows, bytes], as `dtype` [rows, elements]. It is computed in float32 and
    rounded once."""
    if form.reals:
        return data.clone(memory_format=torch.contiguous_format).view(_REALS[form.reals]).to(dtype)
    blocks = data.reshape(-1, form.nbytes)
    out = torch.empty(blocks.shape[0], form.numbers, dtype=dtype, device=data.device)
    scale = _scalar(blocks, form.scale)
    minimum = None if form.minimum is None else _scalar(blocks, form.minimum)
    for group in form.groups:
        gain = scale if not group.scale else scale * _scale_code(form, blocks, group)
        offset = minimum
        if minimum is not None and group.minimum:
            offset = minimum * _codes(blocks, group.minimum, 1).float()
        for run in group.runs:
            values = _values(form, _codes(blocks, run.fields, run.numbers)) * gain
            end = run.first + run.numbers * run.step
            out[:, run.first : end : run.step] = values if offset is None else values - offset
    return out.view(data.shape[0], -1)


def _codes(blocks: torch.Tensor, fields: Sequence[Field | Bits | Points], count: int) -> torch.Tensor:
    """Return the codes of a run of `count` elements, as int32 [blocks, count]."""
    parts = []
    for field in fields:
        if isinstance(field, Points):
            parts.append(_of_points(blocks, field))
        elif isinstance(field, Bits):
            parts.append(_single_bits(blocks, field, count) << field.left)
        else:
            raw = blocks[:, field.byte : field.byte + count].int()
            parts.append((raw >> field.shift & field.mask) << field.left)
    return sum(parts[1:], start=parts[0])


def _of_points(blocks: torch.Tensor, points: Points) -> torch.Tensor:
    """Return the elements of a run that is stored as indices of grid points (a codebook of short vectors), with their
    signs applied."""
    grid = torch.tensor(points.grid.points, dtype=torch.int32, device=blocks.device)
    sizes = grid[torch.cat([_codes(blocks, index, 1) for index in points.indices], 1)].flatten(1)
    if not points.signs:
        return sizes
    signs = torch.stack([_codes(blocks, fields, 1) for fields in points.signs], 1)
    if points.has_even_signs:
        signs = with_eighth_sign(signs)
    is_negative = (signs >> torch.arange(8, dtype=torch.int32, device=blocks.device) & 1).flatten(1).bool()
    return torch.where(is_negative, -sizes, sizes)


def _single_bits(blocks: torch.Tensor, bits: Bits, count: int) -> torch.Tensor:
    raw = blocks[:, bits.byte : bits.byte + count // 8].int()
    shifts = torch.arange(8, dtype=torch.int32, device=blocks.device)
    return (raw.unsqueeze(2) >> shifts & 1).flatten(1)


def _scale_code(form: Format, blocks: torch.Tensor, group: Group) -> torch.Tensor:
    code = _codes(blocks, group.scale, 1)
    if form.has_signed_scales:
        code = code.to(torch.uint8).view(torch.int8).int()
    if form.has_float8_scales:
        return _float8(code)
    return (code - form.scale_zero).float()


def _values(form: Format, codes: torch.Tensor) -> torch.Tensor:
    if form.table is not None:
        return torch.tensor(form.table, device=codes.device)[codes]
    if form.is_float8:
        return _float8(codes)
    if form.is_signed:
        return codes.to(torch.uint8).view(torch.int8).float()
    return (codes - form.zero).float()


def _float8(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _scalar(blocks: torch.Tensor, scalar: Scalar) -> torch.Tensor:
    """Return a scalar of every quantized block, for example its scale, as float32 [blocks, 1]."""
    if scalar.kind == "E8M0":
        exponents = blocks[:, scalar.byte : scalar.byte + 1].int()
        return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
    if scalar.fields:
        bits = _codes(blocks, scalar.fields, 1).to(torch.int16)
        return bits.view(torch.float16).float() * scalar.factor
    kind = torch.float16 if scalar.kind == "F16" else torch.float32
    stored = blocks[:, scalar.byte : scalar.byte + scalar.nbytes].contiguous().view(kind)
    return stored.float() * scalar.factor
