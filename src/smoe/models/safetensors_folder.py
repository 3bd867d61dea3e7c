"""Reads a checkpoint in the hub's layout: a folder with config.json, safetensors files and tokenizer files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from smoe.errors import ModelError
from smoe.memory.checkpoint_json import read_object
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import StoredLayer
from smoe.models.config_file import check_config, check_generation
from smoe.models.dense import check_loaded, move_to_own_memory, quiet_library, stored_apart
from smoe.models.expert_index import index_experts, stored_as
from smoe.models.experts import auto_class, without_weights_on_disk
from smoe.models.files import naming
from smoe.models.library_family import (
    check_implementations,
    family_doubts,
    read_library_config,
    with_own_implementations,
)
from smoe.models.load_observer import OnBytes
from smoe.models.registration import register_local_families
from smoe.models.released_layers import load_released, quantised_layers
from smoe.models.safetensors_sizes import SafetensorsSizes
from smoe.models.spec import LibrarySpec, ModelSpec
from smoe.models.stored_tables import keep_tables_on_disk, stored_tables

_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TOKENIZER_FILE = re.compile(r"tokenizer|special_tokens|added_tokens|vocab|merges|chat_template")


class SafetensorsFolder(SafetensorsSizes):
    """A `Checkpoint` in a folder, read by transformers' own loaders."""

    def config(self) -> PretrainedConfig:
        register_local_families(check_config(self.place))
        check_implementations(read_object(self.config_place), self.config_place)
        with naming(f"cannot read the configuration {self.config_place}", ModelError):
            config = read_library_config(self.place, read_object(self.config_place))
        if self._has_mxfp4 or self._scheme is not None:
            _forget_quantisation(config)
        return with_own_implementations(config)

    def stored_apart(self, shell: PreTrainedModel, dtype: torch.dtype) -> list[str]:
        return stored_apart(shell, self._matrices, dtype) if self.has_weights() else []

    def _read_as(self, fields: Mapping[str, Any]) -> tuple[str, ...]:
        return family_doubts(fields)

    def load_dense(
        self, spec: LibrarySpec, device: torch.device, on_bytes: OnBytes = lambda done, total: None
    ) -> PreTrainedModel:
        spec.config._experts_implementation = "eager"
        check_generation(self.place)
        if self._scheme is not None:
            released = load_released(self.place, spec, self._matrices, on_bytes)
            keep_tables_on_disk(released, stored_tables(spec, self._matrices), spec)
            return released.to(device).eval().requires_grad_(False)
        left_out = without_weights_on_disk(spec.shell, spec.outline.tables)
        with left_out, quiet_library(), naming(f"cannot load the weights in {self.place}"):
            loaded, report = auto_class(spec.config, spec.with_images).from_pretrained(
                self.place,
                config=spec.config,
                dtype=spec.dtype.torch,
                experts_implementation="eager",
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # the mismatch is in the report, and `check_loaded` raises the error
                output_loading_info=True,
            )
        check_loaded(loaded, report, self.place, lambda name: stored_as(loaded, name, self.tensors()), on_bytes)
        if device.type == "cpu":
            move_to_own_memory(loaded)
        if spec.outline.tables:
            keep_tables_on_disk(loaded, stored_tables(spec, self._matrices), spec)
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

    def _index(self, spec: ModelSpec) -> dict[int, StoredLayer]:
        assert isinstance(spec, LibrarySpec), "what is loaded goes by the library's rules"
        if spec.outline.tables:
            stored_tables(spec, self._matrices)  # raises the errors of incomplete tables
        return index_experts(self.place, spec.shell, spec.sites, self._matrices)

    def _stored_layers(self, spec: ModelSpec) -> Mapping[str, StoredTensor]:
        assert isinstance(spec, LibrarySpec), "what is loaded goes by the library's rules"
        return quantised_layers(spec, self._matrices)


def _forget_quantisation(config: PretrainedConfig) -> None:
    """Delete the quantization settings, because transformers would convert the weights or download kernels."""
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
