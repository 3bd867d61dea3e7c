"""The description of a model's files: sizes and formats, from its configuration and file headers, without
transformers."""

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
    """A description of a model's files. The constructor reads nothing.

    Every method raises `CheckpointError`, with file and key, if files are damaged, incomplete or of another model. It
    raises `UnsupportedModelError` if smoe cannot read them exactly.
    """

    @property
    def place(self) -> Path:
        """The folder of the model, or its GGUF file (the first one of a split model)."""

    def fields(self) -> tuple[str, dict[str, Any]]:
        """Return (the model family, named as in transformers; the fields of its configuration)."""

    @property
    def config_place(self) -> Path:
        """The path of the file with the configuration, for messages."""

    def has_weights(self) -> bool:
        """Return whether the weight files are on disk, not only the configuration. No weights are read."""

    def tensors(self) -> dict[str, StoredTensor]:
        """Return every tensor of the model by its key in the files. Only file headers are read."""

    def experts(self, spec: ModelSpec) -> dict[int, StoredLayer]:
        """Return the location of every layer's routed experts, in the precision of `spec`. The names, shapes and types
        of all non-expert weights are compared with `spec` too."""

    def quantised_bytes(self, spec: ModelSpec) -> Mapping[int, int] | None:
        """Return {layer: bytes of one quantized expert}, or None if the experts are not quantized. Raise `ConfigError`
        if the files do not allow the precision of `spec`."""

    def quantised_dense(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        """Return the non-expert weights that can stay quantized, by their transformers names. If there are no weight
        files, the result is computed from the configuration."""

    def file_bytes(self, spec: ModelSpec) -> FileBytes:
        """Return the size of the files. If there are no weight files, it is the size that the configuration implies."""

    def doubts(self, spec: ModelSpec) -> tuple[str, ...]:
        """Return remarks, one sentence each, about points that the model's configuration alone leaves open."""

    def packed(self, contents: Contents) -> Packed | None:
        """Return the file that `smoe pack` has written with the experts that `contents` describes, or None if there is
        no such file."""

    def check_servable(self) -> None:
        """Raise `UnsupportedModelError` if the configuration shows that the experts can only be used after `smoe
        pack`."""

    def check_gatherable(self) -> None:
        """Raise `ConfigError` if packing the experts in their own precision would have no benefit."""


def described_at(place: Path) -> Described:
    """Return the description of the model in a folder or a GGUF file; only the reader of that format is imported."""
    if is_gguf(place) and not place.is_dir():
        from smoe.models.gguf_sizes import GgufSizes

        return GgufSizes(place)
    from smoe.models.safetensors_sizes import SafetensorsSizes

    return SafetensorsSizes(place)
