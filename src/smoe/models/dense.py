"""Checks the non-expert weights that transformers has loaded, and moves them to memory that smoe allocates. Decides
which weights are tied, and counts all parameters.

transformers ties two weights only if their stored values are equal, and compares them while loading. Memory is planned
before that, so the same comparison is made here, piece by piece.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as library_logging

from smoe.errors import CheckpointError
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import MATRIX_ALIGNMENT
from smoe.models.expert_index import parameter_names
from smoe.models.load_observer import OnBytes, WeightBytes


def check_loaded(
    model: PreTrainedModel,
    report: Mapping[str, Any],
    place: Path,
    stored_as: Callable[[str], str],
    on_bytes: OnBytes = lambda done, total: None,
    placeholders: Container[str] = (),
) -> None:
    """Raise `CheckpointError` if a weight is missing, has another shape, or contains NaN or infinity.

    `report`: the loading report of transformers. `stored_as`: returns the file and key of a parameter, for messages.
    `on_bytes` receives the progress: weights that transformers has memory-mapped are read from the disk here.
    `placeholders`: the names of parameters whose values are checked when they are read later.
    """
    mismatched = sorted(entry[0] for entry in report["mismatched_keys"])
    if mismatched:
        raise CheckpointError(
            f"the tensor {mismatched[0]!r} in {place} has another shape than by config.json; download the checkpoint "
            "again"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{place} lacks {len(missing)} weights, beginning with {missing[0]!r}; the checkpoint is incomplete: "
            "download it again"
        )
    parameters = {name: each for name, each in model.named_parameters() if name not in placeholders}
    checked = WeightBytes(sum(parameter.nbytes for parameter in parameters.values()), on_bytes)
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(parameter.sum())) and not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(f"{stored_as(name)} holds NaN or infinity ({place}); download the checkpoint again")
        checked.add(parameter.nbytes)


def built_of(
    state: Mapping[str, torch.Tensor], shell: PreTrainedModel, dtype: torch.dtype
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Return the transformers model with the weights in `state`, and transformers' loading report for `check_loaded`.

    The keys of `state` are names of the checkpoint or of transformers. `shell` is the same model without weights.
    """
    loaded, report = type(shell).from_pretrained(
        None,
        config=shell.config,
        state_dict=dict(state),
        dtype=dtype,
        experts_implementation="eager",
        ignore_mismatched_sizes=True,  # the mismatch is in the report, and `check_loaded` raises the error
        output_loading_info=True,
    )
    return loaded, report


def move_to_own_memory(model: PreTrainedModel) -> None:
    """Copy the weights from files that transformers has memory-mapped to memory that smoe allocates.

    If a mapped file is truncated, the process is killed; if it is overwritten, the model changes; and the system may
    drop mapped pages. bf16 matrices are aligned to cache lines, because at the file's alignment products are a seventh
    slower (docs/log/kernels.md). Matrices of other types keep their offset within a cache line. The bits of their
    products depend on this offset, and grade E0 promises transformers' bits.
    """
    for parameter in model.parameters():  # tied parameters occur once in this iteration and stay tied
        parameter.data = _own(parameter.data)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _own(buffer)  # a new tensor: the old view would keep the mapping


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return _aligned_copy(tensor, 0 if tensor.dtype is torch.bfloat16 else tensor.data_ptr())


def _aligned_copy(tensor: torch.Tensor, address: int) -> torch.Tensor:
    """Return a contiguous copy at an address that equals `address` modulo the cache line size."""
    memory = np.empty(tensor.nbytes + MATRIX_ALIGNMENT, dtype=np.uint8)
    begin = (address - memory.ctypes.data) % MATRIX_ALIGNMENT
    copy = torch.from_numpy(memory[begin : begin + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


one_at_a_time = threading.RLock()
"""A lock that is held while transformers builds a model. transformers changes settings of the whole process, such as
the default dtype, and two concurrent builds could restore them wrongly."""


@contextmanager
def quiet_library() -> Iterator[None]:
    """Suppress the messages of transformers' loader during the `with` block: it would report every expert's key as
    unexpected."""
    with one_at_a_time, _quiet():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    level = library_logging.get_verbosity()
    library_logging.set_verbosity(logging.ERROR)
    bars = library_logging.is_progress_bar_enabled()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)
        if bars:
            library_logging.enable_progress_bar()


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


def count_whole(model: PreTrainedModel, shell: PreTrainedModel) -> None:
    """Make `model.num_parameters()` also count experts on disk and quantized weights, which are not parameters of the
    module.

    `shell`: the model with all its weights on the meta device. The added weights do not count as trainable.
    """
    original: Callable[..., int] = model.num_parameters
    elsewhere = {
        exclude: shell.num_parameters(exclude_embeddings=exclude) - original(exclude_embeddings=exclude)
        for exclude in (False, True)
    }

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        here = original(only_trainable, exclude_embeddings)
        return here if only_trainable else here + elsewhere[exclude_embeddings]

    model.num_parameters = num_parameters  # type: ignore[method-assign]
