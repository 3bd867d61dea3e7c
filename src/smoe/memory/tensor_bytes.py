"""Reads the bytes of stored tensors from the file, without mapping it into memory."""

from __future__ import annotations

import numpy as np
import torch

from smoe.errors import CheckpointError
from smoe.formats.registry import FORMATS
from smoe.memory.expert_files import check_identity
from smoe.memory.safetensors_index import StoredTensor


def read_bytes(tensor: StoredTensor) -> torch.Tensor:
    """Return the bytes of a stored tensor as uint8 [n]. Raise `CheckpointError` if the file has changed since it was
    indexed."""
    data = np.empty(tensor.nbytes, np.uint8)
    with tensor.path.open("rb", buffering=0) as file:
        if tensor.identity is not None:
            check_identity(tensor.path, file.fileno(), tensor.identity)
        file.seek(tensor.offset)
        view, done = data.data, 0
        while done < tensor.nbytes:
            came = file.readinto(view[done:])
            if not came:
                raise CheckpointError(
                    f"{tensor.path} is cut short: it ends inside the tensor {tensor.key!r}; download it again"
                )
            done += came
    return torch.from_numpy(data)


def assembled(matrix: StoredTensor) -> torch.Tensor:
    """Return a matrix that is stored as separate codes and scales, in the blocks that it has in a slot: uint8 [outputs,
    bytes of a row]."""
    form = FORMATS[matrix.dtype]
    found = torch.empty(matrix.shape[0], form.row_bytes(matrix.shape[1]), dtype=torch.uint8)
    slot = found.view(-1).numpy().data
    for each in matrix.made_of:
        if each.arrangement is not None:
            each.arrangement.put(read_bytes(each.tensor).numpy(), slot, each.place, 0)
    return found
