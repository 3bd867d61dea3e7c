"""Quantizes weights to a format, group by group, by least squares.

    codes = round((w - minimum) / scale)        for given scale and minimum
    scale, minimum = least squares              for given codes

Both steps alternate. They begin with grids of several widths, where a grid is the range of values that codes have. The
first grid goes from a group's smallest to its largest number. With two bits this leaves a relative error of 39 % for
groups of 32 numbers, and of 33 % for groups of 16. Narrower grids, which cut off the largest numbers, and the
iterations reduce the latter to 26 %. With three bits and groups of 64 the error is 19 % at first and 17 % at the end.
No data are needed; with data, codes can be better (`compensation.py`). The method is one-dimensional k-means (S. Lloyd,
IEEE Transactions on Information Theory 28(2), 1982) with equidistant centres.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from smoe.formats.base import Format
from smoe.formats.encode import Blocks, encode
from smoe.kernels.unpacked import unpacked
from smoe.packing.compensation import CodeGrid, Compensation

_PIECE_NUMBERS = 2**18
"""The number of elements that are quantized at a time, so that intermediate results stay in the processor's cache."""
_SWEEP_NUMBERS = 2**23
"""The number of elements that are quantized at a time when codes are chosen column by column, which is slow for few
rows."""
_TINY = 1e-30


class _Search(NamedTuple):
    """The parameters of the search for the scale and minimum of a group."""

    widths: tuple[float, ...]
    """The widths of the first grids, relative to a group's whole range."""
    turns: int


_SEARCHES = {2: _Search((1.0, 0.85, 0.7, 0.55), 6), 3: _Search((1.0, 0.85, 0.7), 4), 4: _Search((1.0, 0.8), 3)}
"""The search for each number of bits per code. More widths or iterations would change only the third digit of the
error."""
_REFITS = 3
"""How many times fitting a block's scales and choosing its codes alternate, after the scales of its groups have been
rounded."""


def quantised(
    weights: torch.Tensor, form: Format, compensation: Compensation | None = None
) -> tuple[torch.Tensor, float]:
    """Return `weights` [outputs, columns] quantized to uint8 [outputs, bytes of a row], and the total squared error of
    the weights.

    With a `compensation`, the error of the weights is larger and the error of the matrix's outputs is smaller. Raises
    `OverflowError` if a scale exceeds fp16.
    """
    rows = max(1, (_PIECE_NUMBERS if compensation is None else _SWEEP_NUMBERS) // weights.shape[1])
    pieces, error = [], 0.0
    for piece in weights.split(rows):
        numbers = piece.float()
        blocks = _blocks(numbers, form)
        if compensation is not None:
            codes = compensation.codes(numbers, _grid(blocks, form, numbers.shape)).reshape(blocks.codes.shape)
            blocks = blocks._replace(codes=codes.numpy().astype(blocks.codes.dtype))
        data = torch.from_numpy(encode(form, blocks).reshape(len(piece), -1))
        error += float((unpacked(form, data, torch.float32) - numbers).square().sum(dtype=torch.float64))
        pieces.append(data)
    return torch.cat(pieces), error


def _grid(blocks: Blocks, form: Format, shape: torch.Size) -> CodeGrid:
    """Return the values of the codes of each element, found by dequantizing codes 0 and 1."""
    zeros = np.zeros_like(blocks.codes)
    lowest, next_ = (
        unpacked(form, torch.from_numpy(encode(form, blocks._replace(codes=codes))), torch.float32).view(shape)
        for codes in (zeros, zeros + 1)
    )
    return CodeGrid(lowest, next_ - lowest, *((-127, 127) if form.is_signed else (0, form.most)))


def _blocks(weights: torch.Tensor, form: Format) -> Blocks:
    blocks = weights.reshape(-1, form.numbers)
    if form.is_signed:
        return _symmetric(blocks)
    if len(form.groups) == 1:
        return _with_minimum(blocks, form.most)
    return (_with_group_scales if form.minimum is not None else _around_zero)(blocks, form)


def _symmetric(blocks: torch.Tensor) -> Blocks:
    """Return blocks quantized to signed 8-bit codes, whose values are symmetric around zero."""
    scale = _half(blocks.abs().amax(1, keepdim=True) / 127)
    codes = (blocks / scale.clamp_min(_TINY)).round().clamp(-127, 127)
    return Blocks(codes.to(torch.int8).numpy(), scale[:, 0].half().numpy())


def _with_minimum(blocks: torch.Tensor, most: int) -> Blocks:
    """Return blocks quantized to three or four bits, with one group per block."""
    scale, minimum = map(_half, _fitted(blocks, most))
    codes = _codes(blocks, scale, minimum, most)
    return Blocks(codes.to(torch.uint8).numpy(), scale[:, 0].half().numpy(), minimum[:, 0].half().numpy())


def _with_group_scales(blocks: torch.Tensor, form: Format) -> Blocks:
    """Return blocks quantized to two bits. Each group of a block has a scale and a minimum of 4 bits each, which are
    multiplied by the block's scale and minimum."""
    groups = len(form.groups)
    of_groups = blocks.view(len(blocks), groups, -1)
    steps, lowest = (each.view(-1, groups, 1) for each in _fitted(of_groups.flatten(0, 1), form.most))
    steps = torch.where(lowest > 0, of_groups.amax(2, keepdim=True) / 3, steps)  # a minimum cannot be above zero
    depths = (-lowest).clamp_min(0)
    scale, depth = (each.amax(1, keepdim=True) / 15 for each in (steps, depths))
    scales = (steps / scale.clamp_min(_TINY)).round().clamp(0, 15)
    minimums = (depths / depth.clamp_min(_TINY)).round().clamp(0, 15)
    for _ in range(_REFITS):
        codes = _codes(of_groups, scale * scales, -depth * minimums, 3)
        scale, depth = _refitted(of_groups, scales * codes, minimums.expand_as(codes), scale, depth)
    scale, depth = _half(scale), _half(depth)
    codes = _codes(of_groups, scale * scales, -depth * minimums, 3)
    return Blocks(
        codes.flatten(1).to(torch.uint8).numpy(),
        scale.view(-1).half().numpy(),
        depth.view(-1).half().numpy(),
        scales[..., 0].to(torch.uint8).numpy(),
        minimums[..., 0].to(torch.uint8).numpy(),
    )


def _around_zero(blocks: torch.Tensor, form: Format) -> Blocks:
    """Return blocks quantized to three bits, without a minimum. There is one code more below zero than above zero. So
    the sign of a group's 6-bit scale is chosen to map the number with the largest magnitude to the lowest code."""
    of_groups = blocks.view(len(blocks), len(form.groups), -1)
    steps = _fitted_around_zero(of_groups, form.zero)
    largest = steps.gather(1, steps.abs().argmax(1, keepdim=True))
    scale = largest / -form.scale_zero
    scales = (steps / _divisor(scale)).round().clamp(-form.scale_zero, form.scale_zero - 1)
    for _ in range(_REFITS):
        scale = _slope(of_groups, scales * _codes_around_zero(of_groups, scale * scales, form.zero), scale, (1, 2))
        scales = _best_nearby(of_groups, scale, scales, form)
    scale = _half(scale)
    codes = _codes_around_zero(of_groups, scale * scales, form.zero) + form.zero
    return Blocks(
        codes.flatten(1).to(torch.uint8).numpy(),
        scale.view(-1).half().numpy(),
        group_scales=scales[..., 0].to(torch.int8).numpy(),
    )


def _best_nearby(of_groups: torch.Tensor, scale: torch.Tensor, scales: torch.Tensor, form: Format) -> torch.Tensor:
    """Return a scale code for every group: the code in `scales` or a neighbouring code, whichever has the smallest
    error. If one group of a block has large numbers, the scale codes of the other groups are small, and the nearest
    code is not always the best."""
    best: tuple[torch.Tensor, ...] | None = None
    for step in (0, -1, 1):
        tried = (scales + step).clamp(-form.scale_zero, form.scale_zero - 1)
        found = scale * tried
        error = (_codes_around_zero(of_groups, found, form.zero) * found - of_groups).square().sum(2, keepdim=True)
        best = (error, tried) if best is None else _better(best, (error, tried))
    assert best is not None
    return best[1]


def _codes(numbers: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, most: int) -> torch.Tensor:
    return ((numbers - minimum) / scale.clamp_min(_TINY)).round_().clamp_(0, most)


def _codes_around_zero(numbers: torch.Tensor, scale: torch.Tensor, zero: int) -> torch.Tensor:
    return (numbers / _divisor(scale)).round_().clamp_(-zero, zero - 1)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.abs() > _TINY, scale, _TINY)


def _fitted(groups: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the minimum, both [N, 1], of groups [N, n] for codes from 0 to `most`. They have the
    smallest error among the candidates of the search."""
    search = _SEARCHES[most.bit_length()]
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best: tuple[torch.Tensor, ...] | None = None
    for width in search.widths:
        scale = width * (high - low) / most
        minimum = (low + high) / 2 - width * (high - low) / 2
        for _ in range(search.turns):
            scale, minimum = _line(groups, _codes(groups, scale, minimum, most), scale)
        error = (_codes(groups, scale, minimum, most) * scale + minimum - groups).square().sum(1, keepdim=True)
        found: tuple[torch.Tensor, ...] = (error, scale, minimum)
        best = found if best is None else _better(best, found)
    assert best is not None
    return best[1], best[2]


def _fitted_around_zero(groups: torch.Tensor, zero: int) -> torch.Tensor:
    """Return the scale [..., 1] of groups [..., n] for codes from -zero to zero - 1. It has the smallest error among
    the candidates of the search, and may be negative."""
    search = _SEARCHES[(2 * zero - 1).bit_length()]
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best: tuple[torch.Tensor, ...] | None = None
    for width in search.widths:
        scale = width * largest / -zero
        for _ in range(search.turns):
            scale = _slope(groups, _codes_around_zero(groups, scale, zero), scale, (-1,))
        error = (_codes_around_zero(groups, scale, zero) * scale - groups).square().sum(-1, keepdim=True)
        best = (error, scale) if best is None else _better(best, (error, scale))
    assert best is not None
    return best[1]


def _better(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return for each group the candidate with the smaller error. A candidate is a sequence of tensors, of which the
    first is the error of each group."""
    is_other = other[0] < one[0]
    return tuple(torch.where(is_other, b, a) for a, b in zip(one, other, strict=True))


def _line(numbers: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slope and offset of the least squares line through the points (code, number). If all codes are equal, the
    slope is `scale`."""
    mean_code, mean = codes.mean(1, keepdim=True), numbers.mean(1, keepdim=True)
    from_mean = codes - mean_code
    spread = from_mean.square().sum(1, keepdim=True)
    slope = (from_mean * (numbers - mean)).sum(1, keepdim=True) / spread.clamp_min(_TINY)
    slope = torch.where(spread > 0, slope, scale)
    return slope, mean - slope * mean_code


def _slope(numbers: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    """Return the slope of the least squares line through zero and the points (code, number). If all codes are zero,
    return `scale`."""
    spread = codes.square().sum(over, keepdim=True)
    return torch.where(spread > 0, (codes * numbers).sum(over, keepdim=True) / spread.clamp_min(_TINY), scale)


def _refitted(
    numbers: torch.Tensor, gains: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor, depth: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a block's scale, and its depth (the number by which the block's minimum codes are multiplied), both [N, 1,
    1]. They are fitted by least squares: numbers = scale * gains - depth * offsets."""

    def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum((1, 2), keepdim=True)

    aa, ab, bb = dot(gains, gains), dot(gains, offsets), dot(offsets, offsets)
    ax, bx = dot(gains, numbers), dot(offsets, numbers)
    determinant = aa * bb - ab * ab
    is_clear = determinant > 1e-6 * aa * bb
    safe = torch.where(is_clear, determinant, 1.0)
    new_scale, new_depth = (bb * ax - ab * bx) / safe, (ab * ax - aa * bx) / safe
    is_good = is_clear & (new_scale > 0) & (new_depth >= 0)
    return torch.where(is_good, new_scale, scale), torch.where(is_good, new_depth, depth)


def _half(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers rounded to fp16, as files store them. Raise `OverflowError` beyond its range."""
    rounded = numbers.half().float()
    if not bool(torch.isfinite(rounded).all()):
        raise OverflowError("some weights are so large that their scales exceed the range of fp16")
    return rounded
