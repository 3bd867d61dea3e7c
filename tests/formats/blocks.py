"""Random blocks of every format, and what somebody else's code makes of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from smoe.formats.base import Format
from smoe.formats.registry import OPENAI


def random_rows(form: Format, rows: int, columns: int, seed: int, spread: float = 0.01) -> npt.NDArray[np.uint8]:
    """Any codes at all, with scales of a model's size: uint8 [rows, bytes]."""
    chance = np.random.default_rng(seed)
    data = chance.integers(0, 256, (rows, form.row_bytes(columns)), dtype=np.uint8)
    blocks = data.reshape(-1, form.nbytes)
    for scalar in form.scalars:
        if scalar.is_exponent:
            blocks[:, scalar.byte] = chance.integers(110, 125, len(blocks))
        else:
            scales = chance.uniform(-spread, spread, (len(blocks), 1)).astype(np.float16)
            blocks[:, scalar.byte : scalar.byte + 2] = scales.view(np.uint8)
    return data


def by_gguf(form: Format, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The gguf package's decoder."""
    numbers: npt.NDArray[np.float32] = dequantize(data, GGMLQuantizationType[form.name])
    return numbers


def by_transformers(form: Format, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """transformers' decoder of what OpenAI released: uint8 [rows, bytes] -> [rows, numbers]."""
    blocks = torch.from_numpy(data).view(1, len(data), -1, form.nbytes)
    columns: torch.Tensor = convert_moe_packed_tensors(blocks[..., 1:], blocks[..., 0], dtype=torch.float32)
    return columns[0].t().numpy()


def by_others(form: Format, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Whichever knows the format."""
    return (by_transformers if form.name in OPENAI else by_gguf)(form, data)
