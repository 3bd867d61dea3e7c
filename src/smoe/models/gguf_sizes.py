"""Sizes, experts and quantized layers of a model in a GGUF file, or in the files of a split one, read from their
headers.

The gguf package's table translates the names of weights. A stored matrix equals that of transformers row by row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.memory.gguf_blocks import rearranged
from smoe.memory.gguf_header import GgufHeader
from smoe.memory.gguf_index import index_gguf, is_readable, read_headers
from smoe.memory.quantised_store import expert_bytes, is_quantised
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import StoredLayer
from smoe.models.file_bytes import FileBytes, bytes_of_files
from smoe.models.gguf_config import entries_of, gguf_fields, next_token_layers
from smoe.models.gguf_experts import index_gguf_experts, tensors_of
from smoe.models.gguf_families import architecture_of, family_of
from smoe.models.gguf_family import Entries, GgufFamily
from smoe.models.gguf_sources import WeightSource, sources_of
from smoe.models.outline import Outline
from smoe.models.packed import Contents, Packed, bytes_in_precision, experts_in_precision, not_gatherable, read_packed
from smoe.models.spec import ModelSpec


class GgufSizes:
    """A `Described` model in a GGUF file; `place` is the first part of a split file."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.config_place = place
        self._indexed: tuple[Outline, dict[int, StoredLayer]] | None = None
        """The locations of the experts for the last outline, because a plan needs them several times."""

    def fields(self) -> tuple[str, dict[str, Any]]:
        """Return (the model family, named as in transformers; the fields of its configuration)."""
        architecture_of(self._headers[0])  # refuse an unsupported architecture before any other check of the file
        return gguf_fields(self._headers[0], self._family, self._entries)

    def has_weights(self) -> bool:
        return True

    def tensors(self) -> dict[str, StoredTensor]:
        return dict(self._tensors)

    def experts(self, spec: ModelSpec) -> dict[int, StoredLayer]:
        tensors = self._tensors
        layers = self._layers(spec)
        sources = self._sources(spec)
        self._check_dense(spec, tensors, sources)
        known = {key for source in sources.values() for key in source.keys}
        known |= {tensor.key for layer in layers.values() for tensor in tensors_of(layer)} | self._family.implied.keys()
        first = spec.config.get_text_config().num_hidden_layers
        unread = tuple(f"blk.{first + n}." for n in range(next_token_layers(self._entries)))
        unknown = sorted(
            key
            for key in tensors.keys() - known
            if not key.startswith(unread) and not re.search(self._family.unread, key)
        )
        if unknown:
            raise UnsupportedModelError(
                f"{tensors[unknown[0]].path} holds the tensor {unknown[0]!r}, which transformers' "
                f"{spec.config.model_type!r} does not have: the file is of a variant that smoe does not read"
            )
        if spec.precision == "auto":
            return layers
        return experts_in_precision(self.place, spec)

    def quantised_bytes(self, spec: ModelSpec) -> Mapping[int, int] | None:
        if spec.precision != "auto":
            return bytes_in_precision(spec)
        layers = self._layers(spec)
        if not is_quantised(layers):
            return None
        return {layer: expert_bytes(experts, spec.dtype) for layer, experts in layers.items()}

    def quantised_dense(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        stored, found = self._tensors, {}
        for name, source in self._sources(spec).items():
            weight = spec.outline.weights.get(name)
            can_stay = weight is not None and weight.is_plain and name not in spec.outline.tables
            if weight is not None and can_stay and all(key in stored for key in source.keys):
                matrix = source.whole(stored, weight.shape)
                if matrix is not None:
                    found[name] = matrix
        return found

    def file_bytes(self, spec: ModelSpec) -> FileBytes:
        return bytes_of_files([header.path for header in self._headers])

    def doubts(self, spec: ModelSpec) -> tuple[str, ...]:
        return ()

    def packed(self, contents: Contents) -> Packed | None:
        return read_packed(self.place, contents)

    def check_servable(self) -> None:
        """Do nothing: every GGUF file that can be read can be served."""

    def check_gatherable(self) -> None:
        raise not_gatherable(
            f"{self.place} is a GGUF file, in which every matrix of an expert lies in one piece: there is nothing to "
            "pack but a copy in fewer bits; give `precision`, as int4 or int2",
            "int8, int4, int3 or int2 for a GGUF file",
        )

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        return rearranged(index_gguf(self._headers))

    @cached_property
    def _entries(self) -> Entries:
        return entries_of(self._headers[0], self._tensors)

    @cached_property
    def _family(self) -> GgufFamily:
        return family_of(self._entries)

    @cached_property
    def _headers(self) -> list[GgufHeader]:
        return read_headers(self.place)

    def _sources(self, spec: ModelSpec) -> dict[str, WeightSource]:
        """Return, for every non-expert weight, the stored tensors from which it is made, by its transformers name."""
        of_experts = spec.outline.of_experts
        names = [name for name in spec.outline.stored if name not in of_experts]
        return sources_of(self._family, self._entries, names, spec.config.get_text_config().num_hidden_layers)

    def _check_dense(
        self, spec: ModelSpec, tensors: Mapping[str, StoredTensor], sources: Mapping[str, WeightSource]
    ) -> None:
        """Raise an error if a non-expert weight is missing, or has another shape or an unreadable type."""
        shapes, optional = spec.outline.stored, spec.outline.optional
        missing: list[str] = []
        for name, source in sources.items():
            absent = [key for key in source.keys if key not in tensors]
            if absent:
                is_needed = not optional or name not in spec.outline.weights or not re.search(optional, name)
                missing += absent[:1] if is_needed else []
                continue
            source.check_shape(tensors, shapes[name])
            for key in source.keys:
                if not tensors[key].made_of and not is_readable(tensors[key].dtype):
                    raise UnsupportedModelError(
                        f"the tensor {key!r} in {tensors[key].path} has the data type {tensors[key].dtype}, which "
                        "smoe cannot read; take another file of the model"
                    )
        if missing:
            raise CheckpointError(
                f"{self.place} lacks {len(missing)} weights that its metadata requires, beginning with "
                f"{missing[0]!r}; the file is incomplete: download it again"
            )

    def _layers(self, spec: ModelSpec) -> dict[int, StoredLayer]:
        if self._indexed is None or self._indexed[0] is not spec.outline:
            found = {site.layer: index_gguf_experts(self.place, site, self._tensors) for site in spec.sites}
            self._indexed = spec.outline, found
        return self._indexed[1]
