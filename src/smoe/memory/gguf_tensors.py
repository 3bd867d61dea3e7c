"""Reads GGUF tensors from the file without mapping it, and dequantizes them in chunks of limited size."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from smoe.errors import CheckpointError
from smoe.formats.registry import FORMATS
from smoe.memory.expert_files import check_identity
from smoe.memory.gguf_index import BLOCKS, INTEGERS
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.torch_dtypes import TORCH

_PIECE_ELEMENTS = 2**20
"""The number of elements in a chunk. Dequantizing temporarily takes several times the result's size, which is 4 bytes
per element."""


def read_tensor(tensor: StoredTensor, target: torch.Tensor) -> None:
    """Read a stored tensor's values into `target`, converted to its dtype. `target` must be contiguous and have as many
    elements.

    The gguf package dequantizes in fp32, with one rounding. Raises `CheckpointError` if the file has changed since it
    was indexed.
    """
    flat = target.view(-1)
    source, *scale = (each.tensor for each in tensor.made_of) if tensor.made_of else (tensor,)
    gain = [plain_tensor(each).item() for each in scale]
    done = 0
    for piece in _pieces(source):
        flat[done : done + piece.numel()].copy_(piece * gain[0] if gain else piece)
        done += piece.numel()


def plain_tensor(tensor: StoredTensor) -> torch.Tensor:
    """Return a stored tensor in its own dtype, or in fp32 if it is quantized."""
    target = torch.empty(tensor.shape, dtype=TORCH.get(tensor.dtype, torch.float32))
    read_tensor(tensor, target)
    return target


def _pieces(tensor: StoredTensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's values in chunks of whole rows, as flat tensors: in the stored dtype if torch has it, else in
    fp32."""
    block_elements, block_bytes = BLOCKS[tensor.dtype]
    row_bytes = tensor.shape[-1] // block_elements * block_bytes
    rows, step = prod(tensor.shape[:-1]), max(1, _PIECE_ELEMENTS // max(1, tensor.shape[-1]))
    with tensor.path.open("rb", buffering=0) as file:
        if tensor.identity is not None:
            check_identity(tensor.path, file.fileno(), tensor.identity)
        file.seek(tensor.offset)
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            data = bytearray(count * row_bytes)
            if file.readinto(data) != len(data):
                raise CheckpointError(
                    f"{tensor.path} is cut short: it ends inside the tensor {tensor.key!r}; download it again"
                )
            if not data:
                continue
            if tensor.dtype in TORCH or tensor.dtype in INTEGERS:
                yield torch.frombuffer(data, dtype=TORCH.get(tensor.dtype, torch.int32))
            else:
                blocks = np.frombuffer(data, np.uint8).reshape(count, row_bytes)
                yield torch.from_numpy(_numbers(blocks, tensor.dtype)).view(-1)


def _numbers(blocks: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values of rows of quantized blocks in fp32. The gguf package dequantizes them, or for a plug-in's
    format the format's declaration."""
    if dtype in GGMLQuantizationType.__members__:
        found: np.ndarray = dequantize(blocks, GGMLQuantizationType[dtype])
        return found
    return FORMATS[dtype].decode(blocks)
