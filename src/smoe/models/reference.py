"""Expert weights as the library would have them, read through safetensors' own reader, or dequantised, by the gguf
package or by our reference decoders: the other side of every comparison."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open

from smoe.formats.registry import FORMATS
from smoe.memory.gguf_header import is_gguf
from smoe.memory.gguf_tensors import plain_tensor, read_bytes
from smoe.memory.safetensors_index import StoredTensor, check_identity, read_header
from smoe.memory.store import LayerExperts


def reference_parameters(experts: LayerExperts, chosen: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Fused parameters [len(chosen), ...] of one layer, by part name."""
    parameters: dict[str, torch.Tensor] = {}
    for part in experts.parts:
        rows = [
            torch.cat([_tensor(piece) for piece in experts.sources[expert][part.name]]).reshape(part.shape)
            for expert in chosen
        ]
        parameters[part.name] = torch.stack(rows).to(dtype)
    return parameters


def _tensor(piece: StoredTensor) -> torch.Tensor:
    """A stored tensor, or a row of one: by key through safetensors, or by the gguf package."""
    if is_gguf(piece.path):
        return plain_tensor(piece)
    if piece.dtype in FORMATS:
        form = FORMATS[piece.dtype]
        return torch.from_numpy(form.decode(read_bytes(piece).view(piece.shape[0], -1).numpy()))
    if piece.identity is not None:
        with piece.path.open("rb") as file:
            check_identity(piece.path, file.fileno(), piece.identity)
    for key, tensor in _header(piece.path, piece.path.stat().st_mtime_ns).items():
        if tensor.offset <= piece.offset and piece.offset + piece.nbytes <= tensor.offset + tensor.nbytes:
            with safe_open(piece.path, framework="pt") as file:
                if tensor.nbytes == piece.nbytes:
                    found: torch.Tensor = file.get_tensor(key)
                else:
                    found = file.get_slice(key)[(piece.offset - tensor.offset) // piece.nbytes]
                return found
    raise AssertionError(f"no tensor of {piece.path} holds offset {piece.offset}")


@lru_cache(maxsize=4)
def _header(path: Path, written_ns: int) -> dict[str, StoredTensor]:
    """Read once, and again where the file was written anew."""
    return read_header(path)
