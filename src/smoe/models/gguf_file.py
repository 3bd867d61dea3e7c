"""A checkpoint in a GGUF file, or in the parts of a split one: configuration, tokenizer and weights in one place.

The names of weights are translated by the gguf package's own table. A stored matrix is the library's, row by row; where
a family's rows lie in another order, they are put into the library's when they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from smoe.errors import CheckpointError, ModelError
from smoe.formats.registry import FORMATS
from smoe.memory.gguf_tensors import read_bytes, read_tensor
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.stored_rows import StoredRows
from smoe.models.dense import built_of, check_loaded, quiet_library
from smoe.models.experts import without_expert_weights
from smoe.models.files import naming
from smoe.models.gguf_families import GgufFamily
from smoe.models.gguf_sizes import GgufSizes
from smoe.models.gguf_tokenizer import read_gguf_tokenizer, read_sampling
from smoe.models.quantised_linear import keep_on_disk, keep_quantised
from smoe.models.spec import LibrarySpec


class GgufFile(GgufSizes):
    """A `Checkpoint` in a GGUF file."""

    def config(self) -> PretrainedConfig:
        family, fields = self.fields()
        with naming(f"{self.place} describes no configuration", ModelError):
            config: PretrainedConfig = AutoConfig.for_model(family, **fields)
        config._name_or_path = str(self.place)
        return config

    def stored_apart(self, shell: PreTrainedModel, dtype: torch.dtype) -> list[str]:
        return []  # a matrix of its own is what says that nothing is shared

    def load_dense(self, spec: LibrarySpec, device: torch.device) -> PreTrainedModel:
        spec.config._experts_implementation = "eager"
        sampling = read_sampling(self._headers[0])
        assert all(tensor.path.parent == self.place.parent for tensor in spec.dense.values()), "a header's copy"
        stored, weights = self._tensors, spec.shell.state_dict()
        keys = {name: key for key, name in self._parameters(spec).items() if key in stored}
        # torch's own memory begins at a cache line, where our kernels want matrices to begin
        state = {name: _room(weights[name], name in spec.dense) for name in keys}
        for name in keys.keys() - spec.dense.keys():
            read_tensor(stored[keys[name]], state[name])
            order = _row_order(self._family, name, spec.config, len(state[name]))
            if order is not None:
                state[name] = state[name][order]
        with without_expert_weights(spec.shell), quiet_library(), naming(f"cannot load the weights in {self.place}"):
            loaded, report = built_of(state, spec.shell, spec.dtype.torch)
        check_loaded(loaded, report, self.place, lambda name: f"{keys.get(name, name)!r} in {self.place}")
        for name, tensor in spec.dense.items():
            if name == spec.embedding and spec.embedding_on_disk:
                keep_on_disk(loaded, name, FORMATS[tensor.dtype], StoredRows(tensor), spec.dtype.torch)
                continue
            codes, order = self._codes(tensor), _row_order(self._family, name, spec.config, tensor.shape[0])
            codes = codes if order is None else codes[order]
            keep_quantised(loaded, name, FORMATS[tensor.dtype], codes, spec.dtype.torch)
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


def _row_order(family: GgufFamily, name: str, config: PretrainedConfig, rows: int) -> torch.Tensor | None:
    """Which of a file's rows is each row of the library's weight `name`: [rows]; None where they are the same."""
    module = name.rpartition(".")[0]
    if not family.has_paired_rows or not module.endswith(("self_attn.q_proj", "self_attn.k_proj")):
        return None
    heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _room(weight: torch.Tensor, stays_quantised: bool) -> torch.Tensor:
    """Where a weight is read to; nothing behind it where another layer will take its place."""
    if stays_quantised:
        return torch.zeros((), dtype=weight.dtype).expand(weight.shape)
    return torch.empty(weight.shape, dtype=weight.dtype)
