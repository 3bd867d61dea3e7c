"""A checkpoint in a GGUF file, or in the parts of a split one: configuration, tokenizer and weights in one place.

The names of weights are translated by the gguf package's own table. A stored matrix is the library's, row by row; where
a family's rows lie in another order, they are put into the library's when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.registry import FORMATS
from smoe.memory.gguf_header import GgufHeader
from smoe.memory.gguf_index import index_gguf, read_headers
from smoe.memory.gguf_tensors import is_readable, read_bytes, read_tensor
from smoe.memory.quantised_store import expert_bytes, is_quantised
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import LayerExperts
from smoe.models.dense import built_of, check_loaded, quiet_library
from smoe.models.expert_index import missing_weights
from smoe.models.experts import without_expert_weights
from smoe.models.file_bytes import FileBytes, bytes_of_files
from smoe.models.files import naming
from smoe.models.gguf_config import read_gguf_config
from smoe.models.gguf_experts import check_shape, index_gguf_experts, tensors_of
from smoe.models.gguf_families import FAMILIES, NEXT_TOKEN_LAYERS, GgufFamily, architecture_of, row_order
from smoe.models.gguf_tokenizer import read_gguf_tokenizer, read_sampling
from smoe.models.packed import Contents, Packed, bytes_in_precision, experts_in_precision, not_gatherable, read_packed
from smoe.models.quantised_linear import can_stay_quantised, keep_quantised
from smoe.models.spec import ModelSpec

_CORRECTION = re.compile(r"model\.layers\.(\d+)\..*\be_score_correction_bias")
"""What is added to a router's scores before its choice, by the library's names: a buffer, or part of the block."""


class GgufFile:
    """A `Checkpoint` in a GGUF file; `place` is the first part of a split one."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.config_place = place

    def config(self) -> PretrainedConfig:
        architecture_of(self._headers[0])  # a family that is not read is said before anything of the file is checked
        return read_gguf_config(self._headers[0], self._tensors)

    def has_weights(self) -> bool:
        return True

    def tensors(self) -> dict[str, StoredTensor]:
        return dict(self._tensors)

    def stored_apart(self, shell: PreTrainedModel, dtype: torch.dtype) -> list[str]:
        return []  # a matrix of its own is what says that nothing is shared

    def experts(self, spec: ModelSpec) -> dict[int, LayerExperts]:
        tensors = self._tensors
        layers = self._layers(spec)
        names = self._parameters(spec)
        self._check_dense(spec, tensors, names)
        known = {*names, *(tensor.key for layer in layers.values() for tensor in tensors_of(layer))}
        first = spec.config.num_hidden_layers
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
            module = spec.shell.get_submodule(name.rpartition(".")[0])
            if key in stored and stored[key].dtype in FORMATS and can_stay_quantised(module):
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

    def load_dense(self, spec: ModelSpec, device: torch.device) -> PreTrainedModel:
        spec.config._experts_implementation = "eager"
        sampling = read_sampling(self._headers[0])
        assert all(tensor.path.parent == self.place.parent for tensor in spec.dense.values()), "a header's copy"
        stored, weights = self._tensors, _weights(spec.shell)
        keys = {name: key for key, name in self._parameters(spec).items() if key in stored}
        # torch's own memory begins at a cache line, where our kernels want matrices to begin
        state = {name: _room(weights[name], name in spec.dense) for name in keys}
        for name in keys.keys() - spec.dense.keys():
            read_tensor(stored[keys[name]], state[name])
            order = row_order(self._family, name, spec.config, len(state[name]))
            if order is not None:
                state[name] = state[name][order]
        with without_expert_weights(spec.shell), quiet_library(), naming(f"cannot load the weights in {self.place}"):
            loaded, report = built_of(state, spec.shell, spec.dtype)
        check_loaded(loaded, report, self.place, lambda name: f"{keys.get(name, name)!r} in {self.place}")
        for name, tensor in spec.dense.items():
            codes, order = self._codes(tensor), row_order(self._family, name, spec.config, tensor.shape[0])
            codes = codes if order is None else codes[order]
            keep_quantised(loaded, name, FORMATS[tensor.dtype], codes, spec.dtype)
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
        table = get_tensor_name_map(kind, spec.config.num_hidden_layers)
        experts = {f"{site.name}.{part.name}" for site in spec.sites for part in site.parts}
        found: dict[str, str] = {}
        for name in _weights(spec.shell):
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
        weights = _weights(spec.shell)
        for key, name in names.items():
            tensor = tensors.get(key)
            if tensor is None:
                continue
            wanted = tuple(weights[name].shape)
            check_shape(tensor, wanted)
            if not is_readable(tensor.dtype):
                raise UnsupportedModelError(f"{key!r} in {tensor.path} is {tensor.dtype}, which smoe cannot read")
        experts = {f"{site.name}.{part.name}" for site in spec.sites for part in site.parts}
        reached = {*experts, *(name for key, name in names.items() if key in tensors)}
        buffers = weights.keys() - dict(spec.shell.named_parameters()).keys()
        missing = [*missing_weights(spec.shell, reached), *sorted(buffers - reached)]
        if missing:
            key = next((key for key, name in names.items() if name == missing[0]), missing[0])
            raise CheckpointError(
                f"{self.place} lacks {len(missing)} weights, {key!r} first, which its metadata asks for; the file is "
                "incomplete"
            )

    def _layers(self, spec: ModelSpec) -> dict[int, LayerExperts]:
        modules = {site: spec.shell.get_submodule(site.name) for site in spec.sites}
        return {
            site.layer: index_gguf_experts(self.place, site, module, self._tensors) for site, module in modules.items()
        }


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model: its parameters, tied ones once, and the buffers that are kept."""
    kept = model.state_dict().keys()
    return {**dict(model.named_parameters()), **{name: each for name, each in model.named_buffers() if name in kept}}


def _room(weight: torch.Tensor, stays_quantised: bool) -> torch.Tensor:
    """Where a weight is read to; nothing behind it where another layer will take its place."""
    if stays_quantised:
        return torch.zeros((), dtype=weight.dtype).expand(weight.shape)
    return torch.empty(weight.shape, dtype=weight.dtype)
