"""A checkpoint in a GGUF file, or in the parts of a split one: configuration, tokenizer and weights in one place.

The names of weights are translated by the gguf package's own table. In the families that are read here a stored matrix
is the library's, row by row; nothing is turned or reordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from smoe.errors import CheckpointError, ConfigError, UnsupportedModelError
from smoe.formats.registry import FORMATS
from smoe.memory.gguf_header import GgufHeader
from smoe.memory.gguf_index import index_gguf, read_headers
from smoe.memory.gguf_tensors import is_readable, read_bytes, read_tensor
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import LayerExperts, row_of
from smoe.models.dense import check_loaded, quiet_library
from smoe.models.expert_index import missing_weights
from smoe.models.experts import ExpertsSite, without_expert_weights
from smoe.models.files import naming
from smoe.models.gguf_config import architecture_of, read_gguf_config
from smoe.models.gguf_tokenizer import read_gguf_tokenizer, read_sampling
from smoe.models.packed import Contents, Packed, bytes_in_precision, experts_in_precision, read_packed
from smoe.models.quantised_linear import can_stay_quantised, keep_quantised
from smoe.models.spec import ModelSpec

_GATE, _UP, _DOWN, _GATE_UP = (f"ffn_{name}_exps.weight" for name in ("gate", "up", "down", "gate_up"))
_PARTS = {"gate_up_proj", "down_proj"}


class GgufFile:
    """A `Checkpoint` in a GGUF file; `place` is the first part of a split one."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.config_place = place

    def config(self) -> PretrainedConfig:
        architecture_of(self._headers[0])  # a family that is not read is said before anything of the file is checked
        return read_gguf_config(self._headers[0], self._tensors)

    def tensors(self) -> dict[str, StoredTensor]:
        return dict(self._tensors)

    def experts(self, spec: ModelSpec) -> dict[int, LayerExperts]:
        tensors = self._tensors
        layers = {site.layer: self._layer(site, spec) for site in spec.sites}
        names = self._parameters(spec)
        self._check_dense(spec, tensors, names)
        known = {*names, *(f"blk.{layer}.{name}" for layer in layers for name in (_GATE, _UP, _DOWN, _GATE_UP))}
        unknown = sorted(tensors.keys() - known)
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
        found = {site.layer: self._matrices(site, spec) for site in spec.sites}
        if not any(tensor.dtype in FORMATS for tensors in found.values() for tensor in tensors):
            return None
        experts = {site.layer: site.experts for site in spec.sites}
        return {layer: sum(tensor.nbytes for tensor in found[layer]) // experts[layer] for layer in found}

    def quantised_dense(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        stored, found = self._tensors, {}
        for key, name in self._parameters(spec).items():
            module = spec.shell.get_submodule(name.rpartition(".")[0])
            if key in stored and stored[key].dtype in FORMATS and can_stay_quantised(module):
                found[name] = stored[key]
        return found

    def packed(self, contents: Contents) -> Packed | None:
        return read_packed(self.place, contents)

    def check_gatherable(self) -> None:
        raise ConfigError(
            f"{self.place} is a GGUF file, in which every matrix of an expert lies in one piece: there is nothing to "
            "pack but a copy in fewer bits; give `precision`, as int4 or int2",
            setting="precision",
            given=None,
            allowed="int8, int4 or int2 for a GGUF file",
        )

    def load_dense(self, spec: ModelSpec, device: torch.device) -> PreTrainedModel:
        spec.config._experts_implementation = "eager"
        sampling = read_sampling(self._headers[0])
        stored, weights = self._tensors, dict(spec.shell.named_parameters())
        keys = {name: key for key, name in self._parameters(spec).items() if key in stored}
        # torch's own memory begins at a cache line, where our kernels want matrices to begin
        state = {name: _room(weights[name], name in spec.dense) for name in keys}
        for name in keys.keys() - spec.dense.keys():
            read_tensor(stored[keys[name]], state[name])
        with without_expert_weights(spec.shell), quiet_library(), naming(f"cannot load the weights in {self.place}"):
            loaded, report = type(spec.shell).from_pretrained(
                None,
                config=spec.config,
                state_dict=state,
                dtype=spec.dtype,
                experts_implementation="eager",
                ignore_mismatched_sizes=True,  # reported below, as an error of ours
                output_loading_info=True,
            )
        check_loaded(loaded, report, self.place, lambda name: f"{keys.get(name, name)!r} in {self.place}")
        for name, tensor in spec.dense.items():
            keep_quantised(loaded, name, FORMATS[tensor.dtype], self._codes(tensor), spec.dtype)
        loaded.name_or_path = loaded.config.name_or_path = str(self.place)  # for messages: the loader had no name
        with naming(f"{self.place} says how to choose tokens in a way that cannot be used"):
            said: GenerationConfig = loaded.generation_config
            said.update(**sampling)
            said.validate()
        model: PreTrainedModel = loaded.to(device).eval().requires_grad_(False)
        return model

    def tokenizer(self) -> Any:
        return read_gguf_tokenizer(self._headers[0])

    def _codes(self, tensor: StoredTensor) -> torch.Tensor:
        """A quantised matrix's bytes: uint8 [rows, bytes of a row]."""
        codes = read_bytes(tensor).view(tensor.shape[0], -1)
        if not FORMATS[tensor.dtype].is_finite(codes.numpy()):
            raise CheckpointError(
                f"{tensor.path}: {tensor.key!r} has a scale that is NaN or infinite in {tensor.dtype}; download the "
                "checkpoint again"
            )
        return codes

    @cached_property
    def _tensors(self) -> dict[str, StoredTensor]:
        return index_gguf(self._headers)

    @cached_property
    def _headers(self) -> list[GgufHeader]:
        return read_headers(self.place)

    def _parameters(self, spec: ModelSpec) -> dict[str, str]:
        """The library's name of every weight that is no routed expert's, by its key in a file."""
        architecture = architecture_of(self._headers[0])
        kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
        table = get_tensor_name_map(kind, spec.config.num_hidden_layers)
        experts = {f"{site.name}.{part.name}" for site in spec.sites for part in site.parts}
        found: dict[str, str] = {}
        for name, _ in spec.shell.named_parameters():
            stem, _, suffix = name.rpartition(".")
            key = table.get_name(stem)
            if name in experts:
                continue
            if key is None:
                raise UnsupportedModelError(f"the gguf package has no name for {name!r} of {architecture!r}")
            found[f"{key}.{suffix}"] = name
        return found

    def _check_dense(self, spec: ModelSpec, tensors: Mapping[str, StoredTensor], names: Mapping[str, str]) -> None:
        """Every weight that is no routed expert's is there, in its shape and in a type that can be read."""
        weights = dict(spec.shell.named_parameters())
        for key, name in names.items():
            tensor = tensors.get(key)
            if tensor is None:
                continue
            wanted = tuple(weights[name].shape)
            _check_shape(tensor, wanted)
            if not is_readable(tensor.dtype):
                raise UnsupportedModelError(f"{key!r} in {tensor.path} is {tensor.dtype}, which smoe cannot read")
        experts = {f"{site.name}.{part.name}" for site in spec.sites for part in site.parts}
        missing = missing_weights(spec.shell, {*experts, *(name for key, name in names.items() if key in tensors)})
        if missing:
            key = next((key for key, name in names.items() if name == missing[0]), missing[0])
            raise CheckpointError(
                f"{self.place} lacks {len(missing)} weights, {key!r} first, which its metadata asks for; the file is "
                "incomplete"
            )

    def _layer(self, site: ExpertsSite, spec: ModelSpec) -> LayerExperts:
        """The experts of a layer: row e of each tensor [E, ...] is expert e's."""
        *up, down = self._matrices(site, spec)
        sources = [
            {"gate_up_proj": tuple(row_of(tensor, expert) for tensor in up), "down_proj": (row_of(down, expert),)}
            for expert in range(site.experts)
        ]
        return LayerExperts(site.layer, site.parts, sources)

    def _matrices(self, site: ExpertsSite, spec: ModelSpec) -> list[StoredTensor]:
        """The tensors [E, ...] of a layer's experts: of the first product one or two, then that of the second."""
        if {part.name for part in site.parts} != _PARTS or site.is_transposed:
            raise UnsupportedModelError(
                f"the experts of {spec.config.model_type!r} are kept in another form than in GGUF files; "
                "take the model's safetensors release"
            )
        fused = self._tensors.get(f"blk.{site.layer}.{_GATE_UP}")
        up = [fused] if fused is not None else [self._experts(site, name) for name in (_GATE, _UP)]
        down = self._experts(site, _DOWN)
        shapes = {part.name: part.shape for part in site.parts}
        rows, width = shapes["gate_up_proj"]
        for tensor in up:
            _check_shape(tensor, (site.experts, rows // len(up), width))
        _check_shape(down, (site.experts, *shapes["down_proj"]))
        return [*up, down]

    def _experts(self, site: ExpertsSite, name: str) -> StoredTensor:
        key = f"blk.{site.layer}.{name}"
        tensor = self._tensors.get(key)
        if tensor is None:
            raise CheckpointError(
                f"{self.place} has no {key!r}, the experts of layer {site.layer}, which its metadata asks for; it is "
                "incomplete, or of an old form that keeps every expert apart"
            )
        return tensor


def _check_shape(tensor: StoredTensor, wanted: Sequence[int]) -> None:
    """Raise `CheckpointError` for another shape; dimensions of 1 come and go between ggml and the library."""
    if [n for n in tensor.shape if n != 1] != [n for n in wanted if n != 1]:
        raise CheckpointError(
            f"{tensor.key!r} in {tensor.path} has the shape {list(tensor.shape)}, another shape than its metadata "
            f"says: {list(wanted)}; download it again"
        )


def _room(weight: torch.Tensor, stays_quantised: bool) -> torch.Tensor:
    """Where a weight is read to; nothing behind it where another layer will take its place."""
    if stays_quantised:
        return torch.zeros((), dtype=weight.dtype).expand(weight.shape)
    return torch.empty(weight.shape, dtype=weight.dtype)
