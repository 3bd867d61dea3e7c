"""The non-expert weights, once the library has them: whether they are all there, and where they lie."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as library_logging

from smoe.errors import CheckpointError
from smoe.memory.store import MATRIX_ALIGNMENT


def check_loaded(
    model: PreTrainedModel, report: Mapping[str, Any], place: Path, stored_as: Callable[[str], str]
) -> None:
    """Raise `CheckpointError` where the library's loader, by its `report`, found a weight missing or of another shape,
    or where one holds NaN or infinity; `stored_as` tells file and key of a parameter."""
    mismatched = sorted(entry[0] for entry in report["mismatched_keys"])
    if mismatched:
        raise CheckpointError(f"{mismatched[0]!r} in {place} has another shape than its config.json says")
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{place} lacks {len(missing)} weights, {missing[0]!r} first; the checkpoint is incomplete"
        )
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter.sum())) and not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(f"{stored_as(name)} holds NaN or infinity ({place}); download the checkpoint again")


def built_of(
    state: Mapping[str, torch.Tensor], shell: PreTrainedModel, dtype: torch.dtype
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The library's model of these weights, by a checkpoint's keys or the library's own, as `shell` is of nothing; and
    its loader's report for `check_loaded`."""
    loaded, report = type(shell).from_pretrained(
        None,
        config=shell.config,
        state_dict=dict(state),
        dtype=dtype,
        experts_implementation="eager",
        ignore_mismatched_sizes=True,  # reported, for an error of ours
        output_loading_info=True,
    )
    return loaded, report


def move_to_own_memory(model: PreTrainedModel) -> None:
    """Copy the weights out of the library's file mapping: a mapped file that is cut short kills the process, one that
    is overwritten changes the model, and mapped pages can be dropped.

    bf16 matrices go to cache lines: where the header puts them they cost a seventh of their speed
    (docs/log/kernels.md). The bits of other products depend on the address within a cache line, and grade E0 means the
    library's own bits: they stay where they were within theirs.
    """
    for parameter in model.parameters():  # tied parameters come once and stay tied
        parameter.data = _own(parameter.data)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _own(buffer)  # a new object: the old one is a view, which keeps its base


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return _aligned_copy(tensor, 0 if tensor.dtype is torch.bfloat16 else tensor.data_ptr())


def _aligned_copy(tensor: torch.Tensor, address: int) -> torch.Tensor:
    """A contiguous copy at an address that leaves the same remainder as `address` modulo the cache line."""
    memory = np.empty(tensor.nbytes + MATRIX_ALIGNMENT, dtype=np.uint8)
    begin = (address - memory.ctypes.data) % MATRIX_ALIGNMENT
    copy = torch.from_numpy(memory[begin : begin + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


one_at_a_time = threading.RLock()
"""Held while the library builds a model, which it does by settings of the whole process: two threads that set them back
in another order than they set them would leave bf16 as everybody's default dtype."""


@contextmanager
def quiet_library() -> Iterator[None]:
    """The loader would report every expert key as unexpected: that is what we want it to do with them."""
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
