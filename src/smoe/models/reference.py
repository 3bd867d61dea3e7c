"""Expert weights for comparisons, which are read and dequantized by other code than the engine's.

This code is in safetensors, the gguf package, transformers, and our reference decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from smoe.formats.registry import FORMATS
from smoe.memory.expert_files import check_identity
from smoe.memory.gguf_header import is_gguf
from smoe.memory.safetensors_index import StoredTensor, read_header
from smoe.memory.store import Part, StoredLayer
from smoe.memory.tensor_bytes import read_bytes
from smoe.memory.torch_dtypes import TORCH
from smoe.models.released_numbers import released_numbers
from smoe.models.released_schemes import METHODS


def reference_parameters(experts: StoredLayer, chosen: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return {name of a weight: its values [len(chosen), ...]} for the experts `chosen` of one layer."""
    parameters: dict[str, torch.Tensor] = {}
    for part in experts.parts:
        rows = [
            _joined([stored_numbers(piece) for piece in experts.sources[expert][part.name]], part) for expert in chosen
        ]
        stored = torch.stack(rows).to(dtype)
        parameters[part.name] = stored.transpose(1, 2).contiguous() if part.is_turned else stored
    return parameters


def _joined(pieces: Sequence[torch.Tensor], part: Part) -> torch.Tensor:
    """Return the stored tensors of an expert's weight as one tensor: concatenated, or with alternating rows if the
    model interleaves gate and up."""
    joined = torch.stack(list(pieces), 1).flatten(0, 1) if part.takes_turns else torch.cat(list(pieces))
    return joined.reshape(part.stored_shape)


def stored_numbers(piece: StoredTensor) -> torch.Tensor:
    """Return the dequantized values of a stored tensor, or of one row of a stored tensor."""
    if is_gguf(piece.path):
        from smoe.memory.gguf_tensors import plain_tensor  # the gguf package is needed for GGUF files only

        return plain_tensor(piece)
    if piece.scheme in METHODS:
        return released_numbers(piece, _by_key)
    if piece.made_of:
        codes, scales, *_ = (_by_key(each.tensor) for each in piece.made_of)
        numbers: torch.Tensor = convert_moe_packed_tensors(codes.unsqueeze(0), scales.unsqueeze(0))  # exact in bf16
        return numbers[0].t()
    if piece.dtype in FORMATS:
        form = FORMATS[piece.dtype]
        return torch.from_numpy(form.decode(read_bytes(piece).view(piece.shape[0], -1).numpy()))
    if piece.is_packed:
        return read_bytes(piece).view(TORCH[piece.dtype]).view(piece.shape)
    return _by_key(piece)


def _by_key(piece: StoredTensor) -> torch.Tensor:
    """Return a stored tensor, or some rows of a stored tensor, in the type and shape of the file."""
    if piece.identity is not None:
        with piece.path.open("rb") as file:
            check_identity(piece.path, file.fileno(), piece.identity)
    for key, tensor in _header(piece.path, piece.path.stat().st_mtime_ns).items():
        if tensor.offset <= piece.offset and piece.offset + piece.nbytes <= tensor.offset + tensor.nbytes:
            with safe_open(piece.path, framework="pt") as file:
                if tensor.nbytes == piece.nbytes:
                    found: torch.Tensor = file.get_tensor(key)
                elif tensor.shape[0] * piece.nbytes == tensor.nbytes:
                    found = file.get_slice(key)[(piece.offset - tensor.offset) // piece.nbytes]
                else:  # some rows of a matrix that holds all experts
                    first = (piece.offset - tensor.offset) // piece.nbytes * piece.shape[0]
                    found = file.get_slice(key)[first : first + piece.shape[0]]
                return found
    raise AssertionError(f"no tensor of {piece.path} holds offset {piece.offset}")


@lru_cache(maxsize=4)
def _header(path: Path, written_ns: int) -> dict[str, StoredTensor]:
    """Return the tensors of a file, cached until the file is written again."""
    return read_header(path)
