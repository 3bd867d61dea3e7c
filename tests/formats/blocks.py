"""Random blocks of every format, and what somebody else's code makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from smoe.formats.base import Format, Scalar
from smoe.formats.registry import OPENAI
from smoe.formats.released import RELEASED


def random_rows(form: Format, rows: int, columns: int, seed: int, spread: float = 0.01) -> npt.NDArray[np.uint8]:
    """Any codes at all, with scales of a model's size: uint8 [rows, bytes]."""
    chance = np.random.default_rng(seed)
    if form.reals:
        numbers = chance.normal(0, spread, (rows, columns)).astype(np.float32)
        return quantize(numbers, GGMLQuantizationType[form.name]).view(np.uint8)
    data = chance.integers(0, 256, (rows, form.row_bytes(columns)), dtype=np.uint8)
    blocks = data.reshape(-1, form.nbytes)
    for scalar in form.scalars:
        if scalar.kind == "E8M0":
            blocks[:, scalar.byte] = chance.integers(110, 125, len(blocks))
        else:
            kind = np.float16 if scalar.kind == "F16" else np.float32
            scales = chance.uniform(-spread, spread, (len(blocks), 1)).astype(np.float16).astype(kind)
            put_scalar(blocks, scalar, scales)
    if form.is_float8 or form.has_float8_scales:
        codes = blocks[:, form.scale.nbytes :][:, : len(form.groups) if form.has_float8_scales else None]
        codes[codes & 127 == 127] = 8  # no numbers
    return data


def put_scalar(blocks: npt.NDArray[np.uint8], scalar: Scalar, scales: npt.NDArray[Any]) -> None:
    """Write a block's own number [blocks, 1], of the type that the format has it in."""
    if not scalar.fields:
        blocks[:, scalar.byte : scalar.byte + scalar.nbytes] = scales.view(np.uint8)
        return
    bits = scales.view(np.uint16)[:, 0]
    for field in scalar.fields:
        others = blocks[:, field.byte] & (255 ^ field.mask << field.shift)
        blocks[:, field.byte] = others | (bits >> field.left & field.mask) << field.shift


def by_gguf(form: Format, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The gguf package's decoder."""
    numbers: npt.NDArray[np.float32] = dequantize(data, GGMLQuantizationType[form.name])
    return numbers


def by_transformers(form: Format, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """transformers' decoder of what OpenAI released: uint8 [rows, bytes] -> [rows, numbers]."""
    blocks = torch.from_numpy(data).view(1, len(data), -1, form.nbytes)
    columns: torch.Tensor = convert_moe_packed_tensors(blocks[..., 1:], blocks[..., 0], dtype=torch.float32)
    return columns[0].t().numpy()


def by_torch(form: Format, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Releases' formats as their packages unpack them: (code - zero point) * scale, eight codes a word of 32 bits; and
    torch's own type of eight bits."""
    blocks = torch.from_numpy(data.reshape(-1, form.nbytes))
    scale = blocks[:, :4].contiguous().view(torch.float32)
    if form.has_float8_scales:
        return by_pairs(form, blocks).view(len(data), -1).numpy()
    if form.is_float8:
        numbers = blocks[:, 4:].contiguous().view(torch.float8_e4m3fn).float() * scale
    else:
        bits = int(form.name[1])
        words = blocks[:, 5:].contiguous().view(torch.int32).unsqueeze(2)
        codes = (words >> torch.arange(0, 32, bits, dtype=torch.int32)) & ((1 << bits) - 1)
        numbers = (codes.flatten(1) - blocks[:, 4:5].int()) * scale
    return numbers.view(len(data), -1).numpy()


def by_pairs(form: Format, blocks: torch.Tensor) -> torch.Tensor:
    """NVFP4: [blocks, bytes] -> [blocks, numbers]; a byte of codes has one of each of two groups of 16."""
    groups = form.numbers // 16
    scales = blocks[:, 4 : 4 + groups].contiguous().view(torch.float8_e4m3fn).float()
    codes = blocks[:, 4 + groups :].view(len(blocks), -1, 16)
    numbers = torch.stack((codes & 15, codes >> 4), 2).flatten(1, 2).long()  # [blocks, groups, 16]
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    meant = torch.where(numbers < 8, 1.0, -1.0) * sizes[numbers & 7]
    gains = blocks[:, :4].contiguous().view(torch.float32) * scales
    return (gains.unsqueeze(2) * meant).flatten(1)


def by_others(form: Format, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Whichever knows the format."""
    if form.name in RELEASED:
        return by_torch(form, data)
    return (by_transformers if form.name in OPENAI else by_gguf)(form, data)
