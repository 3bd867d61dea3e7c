"""Reads a model from a folder of safetensors files or from a GGUF file, through one interface.

All code that reads a model uses a `Checkpoint` and does not depend on the file format. The configuration is read first,
the headers of the files are compared with it, and weights are read last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

from smoe.memory.gguf_header import is_gguf
from smoe.models.described import Described
from smoe.models.files import described_place, fetch, local_place
from smoe.models.load_observer import OnBytes
from smoe.models.spec import LibrarySpec


class Checkpoint(Described, Protocol):
    """A model's files, together with the operations that need transformers."""

    def config(self) -> PretrainedConfig:
        """Return the configuration of the transformers model; this works without downloaded weights."""

    def stored_apart(self, shell: PreTrainedModel, dtype: torch.dtype) -> list[str]:
        """Return the names of weights that the configuration ties but that the files store with different values.
        `shell` is the model without weights. The list is empty if the weight files are missing."""

    def load_dense(
        self, spec: LibrarySpec, device: torch.device, on_bytes: OnBytes = lambda done, total: None
    ) -> PreTrainedModel:
        """Return the transformers model with all weights except the experts'. No file stays memory-mapped. Weights
        named in `spec.dense` stay quantized (`quantised_linear.py`). `on_bytes` receives the progress of reading."""

    def tokenizer(self) -> Any:
        """Return the transformers tokenizer, with the chat template if the files have one."""


def checkpoint_at(place: Path) -> Checkpoint:
    """Return the checkpoint in a folder or a GGUF file; only the reader of that format is imported."""
    if is_gguf(place) and not place.is_dir():
        from smoe.models.gguf_file import GgufFile

        return GgufFile(place)
    from smoe.models.safetensors_folder import SafetensorsFolder

    return SafetensorsFolder(place)


def local_checkpoint(model: str | Path) -> Checkpoint | None:
    """Return the checkpoint of a model on disk, or None if `model` has the form of a hub id. Raise `ModelError` if
    `model` is neither."""
    place = local_place(model)
    return None if place is None else checkpoint_at(place)


def described_checkpoint(model: str | Path, revision: str | None) -> Checkpoint:
    """Return a checkpoint whose configuration is on disk. Of a hub model only the configuration is downloaded."""
    return checkpoint_at(described_place(model, revision))


def whole_checkpoint(model: str | Path, revision: str | None) -> Checkpoint:
    """Return a checkpoint whose files are all on disk; missing files are downloaded."""
    return checkpoint_at(fetch(model, revision))
