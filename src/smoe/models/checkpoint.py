"""Where a model comes from: a folder of safetensors, or a GGUF file. What smoe wants to know of either.

Everything that reads a model asks a `Checkpoint`; nothing else knows which of the two it is. The order in which it is
asked is that of the checks: the configuration, then the headers against it, and weights last.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

from smoe.memory.gguf_header import is_gguf
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import LayerExperts
from smoe.models.file_bytes import FileBytes
from smoe.models.files import described_place, fetch, local_place
from smoe.models.gguf_file import GgufFile
from smoe.models.packed import Contents, Packed
from smoe.models.safetensors_folder import SafetensorsFolder
from smoe.models.spec import ModelSpec


class Checkpoint(Protocol):
    """A model's files. Making one reads nothing.

    Every method raises `CheckpointError`, with file and key, for files that are damaged, incomplete or of another
    model, and `UnsupportedModelError` for what smoe cannot read exactly.
    """

    @property
    def place(self) -> Path:
        """The folder, or the file (the first, of a model in parts)."""

    @property
    def config_place(self) -> Path:
        """The file that has the configuration, for messages."""

    def config(self) -> PretrainedConfig:
        """The configuration; all that a checkpoint whose weights were not downloaded can give."""

    def has_weights(self) -> bool:
        """Whether the weights are here, not the configuration alone; nothing is read of them."""

    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor by its key in the file, from the headers alone."""

    def stored_apart(self, shell: PreTrainedModel, dtype: torch.dtype) -> list[str]:
        """Weights of an empty model that are shared by its configuration, and of which the files have different
        numbers, by the library's names; none where the weights are not here."""

    def experts(self, spec: ModelSpec) -> dict[int, LayerExperts]:
        """Where the routed experts of every layer lie, in the precision of `spec`. All other weights are compared with
        `spec`, too: which there are, and of what shape and type."""

    def quantised_bytes(self, spec: ModelSpec) -> Mapping[int, int] | None:
        """An expert of every layer as the files have it, where experts are quantised; else None. Raises `ConfigError`
        for a precision that `spec` cannot have of these files."""

    def quantised_dense(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        """Weights beside the experts that are quantised and can stay so, by the library's names; where the weights are
        not here, those that the configuration speaks of."""

    def file_bytes(self, spec: ModelSpec) -> FileBytes:
        """What the files take; where the weights are not here, what they should take by the configuration."""

    def doubts(self, spec: ModelSpec) -> tuple[str, ...]:
        """What the configuration alone could not say, a sentence each."""

    def packed(self, contents: Contents) -> Packed | None:
        """The file that `smoe pack` wrote with these contents, where there is one."""

    def check_servable(self) -> None:
        """Raise `UnsupportedModelError` where the configuration says that the experts can be packed only."""

    def check_gatherable(self) -> None:
        """Raise `ConfigError` where packing the experts as they are, in one piece each, gains nothing."""

    def load_dense(self, spec: ModelSpec, device: torch.device) -> PreTrainedModel:
        """The library's model with all weights but the experts', in memory of its own: nothing stays mapped. Those of
        `spec.dense` stay quantised (`quantised_linear.py`)."""

    def tokenizer(self) -> Any:
        """The library's tokenizer, with the chat template where the files have one."""


def checkpoint_at(place: Path) -> Checkpoint:
    """The checkpoint in a folder, or in a GGUF file."""
    return GgufFile(place) if is_gguf(place) and not place.is_dir() else SafetensorsFolder(place)


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
