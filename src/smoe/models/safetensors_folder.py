"""A checkpoint as the hub has it: a folder of config.json, safetensors and a tokenizer's files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from smoe.errors import ModelError, UnsupportedModelError
from smoe.formats.mxfp4 import MXFP4_PAIRS
from smoe.memory.checkpoint_json import read_object
from smoe.memory.safetensors_index import StoredTensor, has_shards, index_checkpoint, shard_paths
from smoe.memory.store import LayerExperts
from smoe.models.config_doubts import doubts_of, family_doubts
from smoe.models.config_file import check_config
from smoe.models.dense import check_loaded, move_to_own_memory, quiet_library
from smoe.models.expert_index import index_experts, stored_as
from smoe.models.experts import auto_class, stored_expert_bytes, without_expert_weights
from smoe.models.file_bytes import FileBytes, bytes_of_files, expected_bytes
from smoe.models.files import naming
from smoe.models.generation_file import check_generation
from smoe.models.library_family import read_library_config
from smoe.models.mxfp4_experts import check_mxfp4, has_mxfp4_experts, joined
from smoe.models.mxfp4_experts import form_of as mxfp4_form
from smoe.models.own_implementations import check_implementations, with_own_implementations
from smoe.models.packed import Contents, Packed, bytes_in_precision, experts_in_precision, not_gatherable, read_packed
from smoe.models.registration import register_local_families
from smoe.models.released_layers import expected_layers, load_released, quantised_layers, released_expert_bytes
from smoe.models.released_schemes import Scheme, read_scheme
from smoe.models.released_tensors import joined as released
from smoe.models.spec import ModelSpec
from smoe.models.stated_quantisation import Stated, stated_quantisation
from smoe.models.tied_weights import stored_apart

_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TOKENIZER_FILE = re.compile(r"tokenizer|special_tokens|added_tokens|vocab|merges|chat_template")


class SafetensorsFolder:
    """A `Checkpoint` in a folder, read by the library's own loaders; no code that lies in it is run."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.config_place = place / "config.json"

    def config(self) -> PretrainedConfig:
        register_local_families(check_config(self.place))
        check_implementations(read_object(self.config_place), self.config_place)
        with naming(f"cannot read the configuration {self.config_place}", ModelError):
            config = read_library_config(self.place, read_object(self.config_place))
        if self._has_mxfp4 or self._scheme is not None:
            _forget_quantisation(config)
        return with_own_implementations(config)

    def has_weights(self) -> bool:
        return has_shards(self.place)

    def tensors(self) -> dict[str, StoredTensor]:
        return index_checkpoint(self.place)

    def stored_apart(self, shell: PreTrainedModel, dtype: torch.dtype) -> list[str]:
        return stored_apart(shell, self._matrices, dtype) if self.has_weights() else []

    def experts(self, spec: ModelSpec) -> dict[int, LayerExperts]:
        stored = index_experts(self.place, spec.shell, spec.sites, self._matrices)
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
        if self._scheme is None or self._scheme.is_reordered:  # the latter can only be packed
            return None
        return released_expert_bytes(spec, self._scheme, self.config_place)

    def quantised_dense(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        if self._scheme is None:
            return {}
        if self.has_weights():
            return quantised_layers(spec, self._matrices)
        return {} if self._scheme.is_reordered else expected_layers(spec, self._scheme, self.config_place)

    @cached_property
    def _matrices(self) -> dict[str, StoredTensor]:
        """The tensors, with those joined that are one matrix: tens of thousands, which are asked for three times. Each
        knows which file it was."""
        if self._scheme is not None:
            return released(self.tensors(), self._scheme)
        return joined(self.tensors()) if self._has_mxfp4 else self.tensors()

    def file_bytes(self, spec: ModelSpec) -> FileBytes:
        if self.has_weights():
            return bytes_of_files(shard_paths(self.place))
        return expected_bytes(spec.shell, spec.sites, spec.own_dtype, self._scheme, self._has_mxfp4)

    def doubts(self, spec: ModelSpec) -> tuple[str, ...]:
        said = read_object(self.config_place)
        read_as = family_doubts(said)
        return read_as if self.has_weights() else (*read_as, *doubts_of(said, spec, self._scheme is not None))

    def packed(self, contents: Contents) -> Packed | None:
        return read_packed(self.place, contents)

    def check_servable(self) -> None:
        if self._scheme is not None and self._scheme.is_reordered:
            raise UnsupportedModelError(
                f"{self.config_place}: the experts are quantised in the order of activations ({self._scheme.method}), "
                "and cannot be served as they lie: run smoe pack with `precision` int8 or int4 once, and give the same "
                "`precision` whenever the model is used"
            )

    def check_gatherable(self) -> None:
        """What gains nothing by it is gathered as well; what has no blocks to be gathered in is not."""
        if self._scheme is not None and self._scheme.is_reordered:
            raise not_gatherable(
                f"the experts in {self.place} are quantised in the order of activations ({self._scheme.method}): their "
                "columns lie in another order than their scales, and they cannot be packed as they are; give "
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

    def load_dense(self, spec: ModelSpec, device: torch.device) -> PreTrainedModel:
        spec.config._experts_implementation = "eager"
        check_generation(self.place)
        if self._scheme is not None:
            return load_released(self.place, spec, self._matrices).to(device).eval().requires_grad_(False)
        with without_expert_weights(spec.shell), quiet_library(), naming(f"cannot load the weights in {self.place}"):
            loaded, report = auto_class(spec.config).from_pretrained(
                self.place,
                config=spec.config,
                dtype=spec.dtype,
                experts_implementation="eager",
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # reported below, as an error of ours
                output_loading_info=True,
            )
        check_loaded(loaded, report, self.place, lambda name: stored_as(loaded, name, self.tensors()))
        if device.type == "cpu":
            move_to_own_memory(loaded)
        model: PreTrainedModel = loaded.to(device).eval().requires_grad_(False)
        return model

    def tokenizer(self) -> Any:
        for name in _TOKENIZER_SETTINGS:
            if (self.place / name).exists():
                read_object(self.place / name)
        files = ", ".join(sorted(path.name for path in self.place.iterdir() if _TOKENIZER_FILE.match(path.name)))
        with naming(f"{self.place} has no usable tokenizer ({files or 'no tokenizer.json'})"):
            tokenizer = AutoTokenizer.from_pretrained(self.place, trust_remote_code=False, local_files_only=True)
            tokenizer("a")["input_ids"]
            return tokenizer


def _forget_quantisation(config: PretrainedConfig) -> None:
    """With it the library would convert the weights, or fetch kernels."""
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
