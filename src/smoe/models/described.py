"""What is known of a model by its configuration and the headers of its files, without the library that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from smoe.memory.gguf_header import is_gguf
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import StoredLayer
from smoe.models.file_bytes import FileBytes
from smoe.models.packed import Contents, Packed
from smoe.models.spec import ModelSpec


class Described(Protocol):
    """A model's files as far as sizes go. Making one reads nothing.

    Every method raises `CheckpointError`, with file and key, for files that are damaged, incomplete or of another
    model, and `UnsupportedModelError` for what smoe cannot read exactly.
    """

    @property
    def place(self) -> Path:
        """The folder, or the file (the first, of a model in parts)."""

    def fields(self) -> tuple[str, dict[str, Any]]:
        """(the library's family, the fields of its configuration)"""

    @property
    def config_place(self) -> Path:
        """The file that has the configuration, for messages."""

    def has_weights(self) -> bool:
        """Whether the weights are here, not the configuration alone; nothing is read of them."""

    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor by its key in the file, from the headers alone."""

    def experts(self, spec: ModelSpec) -> dict[int, StoredLayer]:
        """Where the routed experts of every layer lie, in the precision of `spec`. All other weights are compared with
        `spec`, too: which there are, and of what shape and type."""

    def quantised_bytes(self, spec: ModelSpec) -> Mapping[int, int] | None:
        """An expert of every layer as the files have it, where experts are quantised; else None. Raises `ConfigError`
        for a precision that `spec` cannot have of these files."""

    def quantised_dense(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        """Weights other than the experts' that are quantised and can stay so, by the library's names; where the files
        are not here, those that the configuration names."""

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


def described_at(place: Path) -> Described:
    """What is known of the model in a folder, or in a GGUF file; what reads the other of the two is not loaded."""
    if is_gguf(place) and not place.is_dir():
        from smoe.models.gguf_sizes import GgufSizes

        return GgufSizes(place)
    from smoe.models.safetensors_sizes import SafetensorsSizes

    return SafetensorsSizes(place)
