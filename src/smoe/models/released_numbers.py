"""Dequantizes whole matrices of quantized checkpoints, by the formulas of the packages that wrote them.

The results are compared with the blocks in slots, and are the input when experts are packed in another precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from smoe.formats.mxfp4 import E2M1, MXFP4_PAIRS
from smoe.memory.arrangement import StoredScales, Zeros, every_code
from smoe.memory.safetensors_index import StoredTensor

_AWQ_PLACES = (0, 16, 4, 20, 8, 24, 12, 28)
"""The first bits of the codes of eight outputs within a 32-bit word."""


def released_numbers(matrix: StoredTensor, read: Callable[[StoredTensor], torch.Tensor]) -> torch.Tensor:
    """Return a matrix as float32 [outputs, columns]. `read`: returns a stored tensor unchanged."""
    if matrix.dtype.startswith("NVFP4") or matrix.dtype == MXFP4_PAIRS.name:
        return _float4(*(read(each.tensor) for each in matrix.made_of), is_divided=matrix.scheme != "modelopt")
    codes, place = read(matrix.made_of[0].tensor), matrix.made_of[1]
    scales = place.arrangement
    assert isinstance(scales, StoredScales)
    gains = read(place.tensor).float().reshape(scales.shape)
    if codes.dtype is torch.float8_e4m3fn:
        return codes.float() * _everywhere(gains, matrix.shape, scales)
    bits = int(matrix.dtype[1])
    zeros = next((each.tensor for each in matrix.made_of if isinstance(each.arrangement, Zeros)), None)
    stored = None if zeros is None else read(zeros)
    if matrix.scheme == "compressed-tensors":
        whole = _words(codes, bits).flatten(1)
        middle = 1 << bits - 1 if stored is None else _words(stored.t(), bits).flatten(1)[:, : matrix.shape[0]].t()
        group = _groups(matrix, gains.shape[1], read)
        return (whole - torch.as_tensor(middle).expand(gains.shape)[:, group]) * gains[:, group]
    return _turned(matrix, codes, gains, stored, bits, _groups(matrix, gains.shape[0], read))


def _float4(
    codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None = None, *, is_divided: bool
) -> torch.Tensor:
    """Return the values of 4-bit float codes [N, K / 2] with scales [N, groups]. The scales are E4M3 numbers with a
    `factor` for the whole matrix, or powers of two if `factor` is None."""
    codes = codes.view(torch.uint8)
    meant = torch.tensor(E2M1)[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    if factor is None:
        gains = torch.exp2(scales.view(torch.uint8).float() - 127)
    else:
        gains = scales.float() / factor.float() if is_divided else scales.float() * factor.float()
    numbers: torch.Tensor = meant * gains.repeat_interleave(meant.shape[1] // gains.shape[1], 1)
    return numbers


def _turned(
    matrix: StoredTensor,
    codes: torch.Tensor,
    gains: torch.Tensor,
    stored: torch.Tensor | None,
    bits: int,
    group: torch.Tensor,
) -> torch.Tensor:
    """Return a matrix of a GPTQ or AWQ checkpoint, dequantized and transposed, because the file stores it column by
    column."""
    outputs, columns = matrix.shape
    is_awq = matrix.scheme == "awq"
    whole = _words(codes, bits, _AWQ_PLACES).flatten(1) if is_awq else _words(codes.t(), bits).flatten(1).t()
    if stored is None:
        zeros = torch.full(gains.shape, 1 << bits - 1)
    else:
        stored = stored + _less(matrix) * every_code(bits)  # wraps around, as the package's subtraction did
        zeros = _words(stored, bits, _AWQ_PLACES if is_awq else None).flatten(1)
    numbers: torch.Tensor = (whole - zeros[group]) * gains[group]
    assert numbers.shape == (columns, outputs)
    return numbers.t()


def _less(matrix: StoredTensor) -> int:
    return next((each.arrangement.less for each in matrix.made_of if isinstance(each.arrangement, Zeros)), 0)


def _groups(matrix: StoredTensor, count: int, read: Callable[[StoredTensor], torch.Tensor]) -> torch.Tensor:
    """Return for each column of a matrix the number of its group, [columns]. The columns of a group have a scale in
    common."""
    order = next((each.tensor for each in matrix.made_of if each.arrangement is None), None)
    if order is not None:
        return read(order).long()
    return torch.arange(matrix.shape[1]) // (matrix.shape[1] // count)


def _everywhere(gains: torch.Tensor, shape: Sequence[int], scales: StoredScales) -> torch.Tensor:
    tall = gains.repeat_interleave(scales.rows_each, 0)[: shape[0]]
    return tall.repeat_interleave(shape[1] // gains.shape[1], 1)


def _words(words: torch.Tensor, bits: int, places: Sequence[int] | None = None) -> torch.Tensor:
    """Return the codes [a, b, codes per word] that are packed in int32 words [a, b]."""
    shifts = torch.tensor(places or range(0, 32, bits), dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
