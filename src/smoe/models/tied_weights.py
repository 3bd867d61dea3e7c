"""Finds weights that a model's configuration ties but that the checkpoint stores with different values.

transformers compares the two tensors while loading, and ties them only if they are equal. Memory is planned before
that, so the same comparison is made here, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from smoe.memory.safetensors_index import StoredTensor
from smoe.models.expert_index import parameter_names

_PIECE_ELEMENTS = 2**20


def stored_apart(shell: PreTrainedModel, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> list[str]:
    """Return the names of tied weights whose stored values differ in `dtype`."""
    if not shell.all_tied_weights_keys:
        return []
    names = parameter_names(shell, tensors)
    stored = {name: tensors[key] for key, name in names.items()}
    pairs = shell.all_tied_weights_keys.items()
    return [
        target
        for target, source in pairs
        if target in stored and source in stored and not _are_equal(stored[source], stored[target], dtype)
    ]


def separate(shell: PreTrainedModel, names: list[str]) -> None:
    """Untie the weights `names` of `shell`, a model without weights."""
    for name in names:
        owner, _, key = name.rpartition(".")
        shared = shell.get_parameter(name)
        own = nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)
        setattr(shell.get_submodule(owner), key, own)
        shell.all_tied_weights_keys.pop(name)


def _are_equal(source: StoredTensor, target: StoredTensor, dtype: torch.dtype) -> bool:
    if source.made_of or target.made_of or source.shape != target.shape:
        return False
    pieces = zip(_rows(source), _rows(target), strict=True)
    return all(torch.equal(ours.to(dtype), theirs.to(dtype)) for ours, theirs in pieces)


def _rows(tensor: StoredTensor) -> Iterator[torch.Tensor]:
    """Yield consecutive pieces of a tensor, each of several rows. Two tensors of equal shape are divided in the same
    way."""
    rows, *columns = tensor.shape or (1,)
    step = max(1, _PIECE_ELEMENTS // max(1, *columns, 1))
    with safe_open(tensor.path, framework="pt") as file:
        stored = file.get_slice(tensor.key)
        for begin in range(0, rows, step):
            yield stored[begin : begin + step]
