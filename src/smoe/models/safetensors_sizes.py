"""Sizes, experts and quantized layers of a model in a folder, from config.json and the headers of its safetensors
files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from smoe.errors import UnsupportedModelError
from smoe.formats.mxfp4 import MXFP4_PAIRS
from smoe.memory.checkpoint_json import read_object
from smoe.memory.safetensors_index import StoredTensor, has_shards, index_checkpoint, shard_paths
from smoe.memory.store import StoredLayer
from smoe.models.config_doubts import doubts_of, read_as
from smoe.models.config_file import check_config
from smoe.models.expert_keys import index_by_keys, layers_by_keys
from smoe.models.file_bytes import FileBytes, bytes_of_files, expected_bytes
from smoe.models.mxfp4_experts import check_mxfp4, has_mxfp4_experts, joined
from smoe.models.mxfp4_experts import form_of as mxfp4_form
from smoe.models.packed import Contents, Packed, bytes_in_precision, experts_in_precision, not_gatherable, read_packed
from smoe.models.released_schemes import Scheme, Stated, read_scheme, stated_quantisation
from smoe.models.released_sizes import expected_layers, released_expert_bytes
from smoe.models.released_tensors import joined as released
from smoe.models.spec import ModelSpec
from smoe.models.stored_experts import stored_expert_bytes

_PUBLISHED_AS = {"kimi_k2": ("DeepseekV3ForCausalLM", "deepseek_v3")}
"""{name under which a family is published: (the transformers class that computes it, the family of that class)}."""


class SafetensorsSizes:
    """A `Described` model in a folder; no code in the folder is executed."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.config_place = place / "config.json"

    def fields(self) -> tuple[str, dict[str, Any]]:
        family, fields = check_config(self.place), dict(read_object(self.config_place))
        family = _published_as(fields) or family
        if self._has_mxfp4 or self._scheme is not None:
            fields = {key: _unquantised(value) for key, value in fields.items() if key != "quantization_config"}
        return family, fields

    def has_weights(self) -> bool:
        return has_shards(self.place)

    def tensors(self) -> dict[str, StoredTensor]:
        return index_checkpoint(self.place)

    def experts(self, spec: ModelSpec) -> dict[int, StoredLayer]:
        stored = self._index(spec)
        if self._has_mxfp4:
            check_mxfp4(stored)
        if spec.precision == "auto":
            return stored
        return experts_in_precision(self.place, spec)

    def quantised_bytes(self, spec: ModelSpec) -> Mapping[int, int] | None:
        if spec.precision != "auto":
            return bytes_in_precision(spec)
        if self._has_mxfp4:
            blocks = f"MXFP4 comes in blocks of {MXFP4_PAIRS.numbers}"
            return stored_expert_bytes(
                spec.sites, spec.dtype, lambda _, columns: mxfp4_form(columns), self.config_place, blocks
            )
        if self._scheme is None or self._scheme.is_reordered:  # with act-order: such experts can only be packed
            return None
        return released_expert_bytes(spec, self._scheme, self.config_place)

    def quantised_dense(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        if self._scheme is None:
            return {}
        if self.has_weights():
            return self._stored_layers(spec)
        return {} if self._scheme.is_reordered else expected_layers(spec, self._scheme, self.config_place)

    @cached_property
    def _matrices(self) -> dict[str, StoredTensor]:
        """The tensors, with codes and scales joined to quantized matrices. They are stored because there are tens of
        thousands, and they are used three times."""
        if self._scheme is not None:
            return released(self.tensors(), self._scheme)
        return joined(self.tensors()) if self._has_mxfp4 else self.tensors()

    def file_bytes(self, spec: ModelSpec) -> FileBytes:
        if self.has_weights():
            return bytes_of_files(shard_paths(self.place))
        return expected_bytes(spec.outline, spec.own_dtype, self._scheme, self._has_mxfp4)

    def doubts(self, spec: ModelSpec) -> tuple[str, ...]:
        stated = read_object(self.config_place)
        how = self._read_as(stated)
        return how if self.has_weights() else (*how, *doubts_of(stated, spec, self._scheme is not None))

    def _read_as(self, stated: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a remark if the family is published under another name and is read as a known one."""
        family = _published_as(stated)
        return () if family is None else (read_as(stated, family),)

    def packed(self, contents: Contents) -> Packed | None:
        return read_packed(self.place, contents)

    def check_servable(self) -> None:
        if self._scheme is not None and self._scheme.is_reordered:
            raise UnsupportedModelError(
                f"{self.config_place}: the experts are quantised in the order of activations ({self._scheme.method}), "
                "and cannot be used directly: run smoe pack with `precision=int8` or int4 once, and give the same "
                "`precision` whenever the model is used"
            )

    def check_gatherable(self) -> None:
        """Raise `ConfigError` if the experts cannot be packed unchanged. Packing without a benefit is allowed."""
        if self._scheme is not None and self._scheme.is_reordered:
            raise not_gatherable(
                f"the experts in {self.place} are quantised in the order of activations ({self._scheme.method}): their "
                "columns are in another order than their scales, so they cannot be packed unchanged; give "
                "`precision`, as int8 or int4",
                "int8, int4, int3 or int2 for such experts",
            )

    @cached_property
    def _has_mxfp4(self) -> bool:
        return has_mxfp4_experts(read_object(self.config_place))

    @cached_property
    def _stated(self) -> Stated | None:
        return stated_quantisation(self.config_place)

    @cached_property
    def _scheme(self) -> Scheme | None:
        return read_scheme(self._stated)

    def _index(self, spec: ModelSpec) -> dict[int, StoredLayer]:
        """Return the stored tensors of every expert, by layer. The names and shapes of other weights are compared with
        `spec` too."""
        return index_by_keys(spec, self._matrices)

    def _stored_layers(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        """Return the non-expert layers that are quantized in the files and stay quantized."""
        return layers_by_keys(spec, self._matrices)


def _unquantised(field: Any) -> Any:
    """Return the value of a field; if it is a nested configuration, without its quantization."""
    if not isinstance(field, dict):
        return field
    return {key: value for key, value in field.items() if key != "quantization_config"}


def _published_as(stated: Mapping[str, Any]) -> str | None:
    """Return the transformers family of a model that is published under another name, otherwise None."""
    named, family = _PUBLISHED_AS.get(str(stated.get("model_type")), ("", None))
    architectures = stated.get("architectures")
    is_stated = bool(stated.get("auto_map")) and isinstance(architectures, list) and named in architectures
    return family if is_stated else None
