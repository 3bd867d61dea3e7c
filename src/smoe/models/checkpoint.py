"""Where a model comes from: a folder of safetensors, or a GGUF file. What smoe wants to know of either.

Everything that reads a model asks a `Checkpoint`; nothing else knows which of the two it is. The order in which it is
asked is that of the checks: the configuration, then the headers against it, and weights last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

from smoe.memory.gguf_header import is_gguf
from smoe.models.described import Described
from smoe.models.files import described_place, fetch, local_place
from smoe.models.spec import LibrarySpec


class Checkpoint(Described, Protocol):
    """A model's files, with what takes the library to read them."""

    def config(self) -> PretrainedConfig:
        """The configuration; all that a checkpoint whose weights were not downloaded can give."""

    def stored_apart(self, shell: PreTrainedModel, dtype: torch.dtype) -> list[str]:
        """Weights of an empty model that are shared by its configuration, and of which the files have different
        numbers, by the library's names; none where the weights are not here."""

    def load_dense(self, spec: LibrarySpec, device: torch.device) -> PreTrainedModel:
        """The library's model with all weights but the experts', in memory of its own: nothing stays mapped. Those of
        `spec.dense` stay quantised (`quantised_linear.py`)."""

    def tokenizer(self) -> Any:
        """The library's tokenizer, with the chat template where the files have one."""


def checkpoint_at(place: Path) -> Checkpoint:
    """The checkpoint in a folder, or in a GGUF file; what reads the other of the two is not loaded."""
    if is_gguf(place) and not place.is_dir():
        from smoe.models.gguf_file import GgufFile

        return GgufFile(place)
    from smoe.models.safetensors_folder import SafetensorsFolder

    return SafetensorsFolder(place)


def local_checkpoint(model: str | Path) -> Checkpoint | None:
    """A model that is on disk, else None: `model` is then a hub id by its form. Raises `ModelError` for neither."""
    place = local_place(model)
    return None if place is None else checkpoint_at(place)


def described_checkpoint(model: str | Path, revision: str | None) -> Checkpoint:
    """A model of which the configuration is here: nothing else of a hub model is downloaded."""
    return checkpoint_at(described_place(model, revision))


def whole_checkpoint(model: str | Path, revision: str | None) -> Checkpoint:
    """A model all of whose files are here, downloaded if need be."""
    return checkpoint_at(fetch(model, revision))
