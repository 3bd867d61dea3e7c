"""What a GGUF file, or the parts of a split one, say of a model by their headers: sizes, experts, quantised layers.

The names of weights are translated by the gguf package's own table. A stored matrix is the library's, row by row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.registry import FORMATS
from smoe.memory.gguf_header import GgufHeader
from smoe.memory.gguf_index import index_gguf, is_readable, read_headers
from smoe.memory.quantised_store import expert_bytes, is_quantised
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import LayerExperts
from smoe.models.file_bytes import FileBytes, bytes_of_files
from smoe.models.gguf_config import gguf_fields
from smoe.models.gguf_experts import check_shape, index_gguf_experts, tensors_of
from smoe.models.gguf_families import FAMILIES, NEXT_TOKEN_LAYERS, GgufFamily, architecture_of
from smoe.models.packed import Contents, Packed, bytes_in_precision, experts_in_precision, not_gatherable, read_packed
from smoe.models.spec import ModelSpec

_CORRECTION = re.compile(r"model\.layers\.(\d+)\..*\be_score_correction_bias")
"""What is added to a router's scores before its choice, by the library's names: a buffer, or part of the block."""


class GgufSizes:
    """A `Described` in a GGUF file; `place` is the first part of a split one."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.config_place = place

    def fields(self) -> tuple[str, dict[str, Any]]:
        """(the library's family, the fields of its configuration)"""
        architecture_of(
            self._headers[0]
        )  # an unsupported family is refused before anything else of the file is checked
        return gguf_fields(self._headers[0], self._tensors)

    def has_weights(self) -> bool:
        return True

    def tensors(self) -> dict[str, StoredTensor]:
        return dict(self._tensors)

    def experts(self, spec: ModelSpec) -> dict[int, LayerExperts]:
        tensors = self._tensors
        layers = self._layers(spec)
        names = self._parameters(spec)
        self._check_dense(spec, tensors, names)
        known = {*names, *(tensor.key for layer in layers.values() for tensor in tensors_of(layer))}
        first = spec.config.get_text_config().num_hidden_layers
        unread = tuple(f"blk.{first + n}." for n in range(getattr(spec.config, NEXT_TOKEN_LAYERS, 0)))
        unknown = sorted(key for key in tensors.keys() - known if not key.startswith(unread))
        if unknown:
            raise UnsupportedModelError(
                f"{tensors[unknown[0]].path} holds {unknown[0]!r}, for which transformers' "
                f"{spec.config.model_type!r} has no place: the file is of a variant that smoe does not read"
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
        for key, name in self._parameters(spec).items():
            weight = spec.outline.weights.get(name)
            if key in stored and stored[key].dtype in FORMATS and weight is not None and weight.is_plain:
                found[name] = stored[key]
        return found

    def file_bytes(self, spec: ModelSpec) -> FileBytes:
        return bytes_of_files([header.path for header in self._headers])

    def doubts(self, spec: ModelSpec) -> tuple[str, ...]:
        return ()

    def packed(self, contents: Contents) -> Packed | None:
        return read_packed(self.place, contents)

    def check_servable(self) -> None:
        """Whatever is read of a GGUF file is served."""

    def check_gatherable(self) -> None:
        raise not_gatherable(
            f"{self.place} is a GGUF file, in which every matrix of an expert lies in one piece: there is nothing to "
            "pack but a copy in fewer bits; give `precision`, as int4 or int2",
            "int8, int4, int3 or int2 for a GGUF file",
        )

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        return index_gguf(self._headers)

    @property
    def _family(self) -> GgufFamily:
        return FAMILIES[architecture_of(self._headers[0])]

    @cached_property
    def _headers(self) -> list[GgufHeader]:
        return read_headers(self.place)

    def _parameters(self, spec: ModelSpec) -> dict[str, str]:
        """The library's name of every weight that is no routed expert's, by its key in a file."""
        architecture = architecture_of(self._headers[0])
        kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
        if kind is None:
            raise UnsupportedModelError(
                f"the installed gguf package does not know {architecture!r}; take a newer one (pip install -U gguf)"
            )
        table = get_tensor_name_map(kind, spec.config.get_text_config().num_hidden_layers)
        experts = spec.outline.of_experts
        found: dict[str, str] = {}
        for name in spec.outline.stored:
            stem, _, suffix = name.rpartition(".")
            if name in experts:
                continue
            correction = _CORRECTION.fullmatch(name)
            if correction is not None:
                found[f"blk.{correction[1]}.exp_probs_b.bias"] = name
                continue
            key, suffix = (table.get_name(stem), suffix) if table.get_name(stem) else (table.get_name(name), "weight")
            if key is None:
                raise UnsupportedModelError(f"the gguf package has no name for {name!r} of {architecture!r}")
            found[f"{key}.{suffix}"] = name
        return found

    def _check_dense(self, spec: ModelSpec, tensors: Mapping[str, StoredTensor], names: Mapping[str, str]) -> None:
        """Every weight that is no routed expert's is there, in its shape and in a type that can be read."""
        shapes = spec.outline.stored
        for key, name in names.items():
            tensor = tensors.get(key)
            if tensor is None:
                continue
            check_shape(tensor, shapes[name])
            if not is_readable(tensor.dtype):
                raise UnsupportedModelError(f"{key!r} in {tensor.path} is {tensor.dtype}, which smoe cannot read")
        reached = {*spec.outline.of_experts, *(name for key, name in names.items() if key in tensors)}
        optional = spec.outline.optional
        missing = [
            name
            for name in shapes
            if name not in reached and not (optional and name in spec.outline.weights and re.search(optional, name))
        ]
        if missing:
            key = next((key for key, name in names.items() if name == missing[0]), missing[0])
            raise CheckpointError(
                f"{self.place} lacks {len(missing)} weights, {key!r} first, which its metadata asks for; the file is "
                "incomplete"
            )

    def _layers(self, spec: ModelSpec) -> dict[int, LayerExperts]:
        return {site.layer: index_gguf_experts(self.place, site, self._tensors) for site in spec.sites}
