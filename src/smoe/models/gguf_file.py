"""A checkpoint in a GGUF file, or in the files of a split one: configuration, tokenizer and weights.

The gguf package's table translates the names of weights. A stored matrix equals that of transformers row by row, unless
the family has an `Arrangement` for it, which is applied while the matrix is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from smoe.errors import CheckpointError, ModelError, UnsupportedModelError
from smoe.formats.registry import FORMATS
from smoe.memory.gguf_tensors import plain_tensor, read_tensor
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.stored_rows import StoredRows
from smoe.memory.tensor_bytes import assembled, read_bytes
from smoe.models.dense import built_of, check_loaded, quiet_library
from smoe.models.experts import without_weights_on_disk
from smoe.models.files import naming
from smoe.models.gguf_sizes import GgufSizes
from smoe.models.gguf_sources import WeightSource
from smoe.models.gguf_tokenizer import read_gguf_tokenizer, read_sampling
from smoe.models.load_observer import OnBytes, WeightBytes
from smoe.models.quantised_linear import keep_on_disk, keep_quantised, layers_of_weights
from smoe.models.registration import register_local_families
from smoe.models.spec import LibrarySpec
from smoe.models.stored_tables import check_table, keep_tables_on_disk

_READING_THREADS = 2
"""The threads that read quantized weights: one thread reads while the other one checks what it has read."""


class GgufFile(GgufSizes):
    """A `Checkpoint` in a GGUF file."""

    def config(self) -> PretrainedConfig:
        family, fields = self.fields()
        register_local_families(family)
        with naming(f"{self.place} describes no configuration", ModelError):
            config: PretrainedConfig = AutoConfig.for_model(family, **fields)
        config._name_or_path = str(self.place)
        return config

    def stored_apart(self, shell: PreTrainedModel, dtype: torch.dtype) -> list[str]:
        return []  # in GGUF files a stored output matrix is what makes a model untied

    def load_dense(
        self, spec: LibrarySpec, device: torch.device, on_bytes: OnBytes = lambda done, total: None
    ) -> PreTrainedModel:
        spec.config._experts_implementation = "eager"
        sampling = read_sampling(self._headers[0])
        assert all(tensor.path.parent == self.place.parent for tensor in spec.dense.values()), "a header's copy"
        self._check_implied(spec.config)
        stored, weights = self._tensors, spec.shell.state_dict()
        sources = {
            name: source for name, source in self._sources(spec).items() if all(key in stored for key in source.keys)
        }
        tables = {name: (stored[sources.pop(name).keys[0]],) for name in spec.outline.tables}
        for name, parts in tables.items():
            check_table(parts, spec.outline.weights[name].shape)
        # torch's memory begins at a cache line, as our kernels require of matrices
        wide = {name for name, weight in spec.outline.weights.items() if weight.is_wide}
        state = {name: _room(weights[name], name in spec.dense, name in wide) for name in sources}
        on_disk = {spec.embedding} & spec.dense.keys() if spec.embedding_on_disk else set()
        sizes = {name: sum(stored[key].nbytes for key in sources[name].keys) for name in sources.keys() - on_disk}
        read = WeightBytes(sum(sizes.values()), on_bytes)
        for name in sources.keys() - spec.dense.keys():
            self._read(sources[name], spec.config, state[name])
            read.add(sizes[name])
        left_out = without_weights_on_disk(spec.shell, spec.outline.tables)
        with left_out, quiet_library(), naming(f"cannot load the weights in {self.place}"):
            loaded, report = built_of(state, spec.shell, spec.dtype.torch)
        check_loaded(
            loaded,
            report,
            self.place,
            lambda name: f"{_key_of(sources, name)!r} in {self.place}",
            placeholders=spec.dense.keys(),
        )
        for name in spec.dense.keys() & on_disk:
            tensor = spec.dense[name]
            keep_on_disk(loaded, name, FORMATS[tensor.dtype], StoredRows(tensor), spec.dtype.torch)
        layers = layers_of_weights(loaded)
        for name, codes in self._codes_of_each({name: sources[name] for name in spec.dense.keys() - on_disk}, spec):
            columns = _moved_columns(sources[name], spec.config, spec.dense[name].shape[1])
            keep_quantised(loaded, layers[name], FORMATS[spec.dense[name].dtype], codes, spec.dtype.torch, columns)
            read.add(sizes[name])
        keep_tables_on_disk(loaded, tables, spec)
        loaded.name_or_path = loaded.config.name_or_path = str(self.place)  # for messages: the loader was given no name
        with naming(f"the sampling settings in {self.place} cannot be used"):
            generation: GenerationConfig = loaded.generation_config
            generation.update(**sampling)
            generation.validate()
        model: PreTrainedModel = loaded.to(device).eval().requires_grad_(False)
        return model

    def tokenizer(self) -> Any:
        return read_gguf_tokenizer(self._headers[0])

    def _check_implied(self, config: PretrainedConfig) -> None:
        """Raise `UnsupportedModelError` if the file contains other values of a tensor than those that transformers
        computes by itself."""
        for key, numbers in self._family.implied.items():
            tensor = self._tensors.get(key)
            if tensor is None:
                continue
            wanted, found = torch.tensor(numbers(config)), plain_tensor(tensor).float().flatten()
            if wanted.shape != found.shape or not torch.allclose(wanted, found, rtol=1e-4):
                raise UnsupportedModelError(
                    f"{tensor.path}: {key!r} has other values than those that transformers' {config.model_type!r} "
                    "computes; take the model's safetensors release"
                )

    def _read(self, source: WeightSource, config: PretrainedConfig, target: torch.Tensor) -> None:
        """Write the values of a weight, converted to transformers' layout, into `target`."""
        if source.arrangement is None:
            read_tensor(self._tensors[source.keys[0]], target)
            return
        parts = [plain_tensor(self._tensors[key]) for key in source.keys]
        with naming(f"{', '.join(source.keys)} in {self.place} do not fit together"):
            target.copy_(source.arrangement.whole(parts, config).reshape(target.shape))

    def _codes_of_each(
        self, sources: Mapping[str, WeightSource], spec: LibrarySpec
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the codes of each weight of `sources`, in the order of the file."""
        first = {name: self._tensors[source.keys[0]] for name, source in sources.items()}
        names = sorted(sources, key=lambda name: (str(first[name].path), first[name].offset))
        pool = ThreadPoolExecutor(_READING_THREADS)
        try:
            found = pool.map(lambda name: self._all_codes(sources[name], spec.config), names)
            yield from zip(names, found, strict=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def _all_codes(self, source: WeightSource, config: PretrainedConfig) -> torch.Tensor:
        """Return the bytes of a weight that stays quantized, with the rows in transformers' order."""
        parts = [self._codes(self._tensors[key]) for key in source.keys]
        if source.arrangement is None or source.arrangement.moves_columns:
            return parts[0]
        with naming(f"{', '.join(source.keys)} in {self.place} do not fit together"):
            return source.arrangement.whole(parts, config).contiguous()

    def _codes(self, tensor: StoredTensor) -> torch.Tensor:
        """Return the bytes of a stored quantized matrix, uint8 [rows, bytes of a row]."""
        codes = assembled(tensor) if tensor.made_of else read_bytes(tensor).view(tensor.shape[0], -1)
        if not FORMATS[tensor.dtype].is_finite(codes.numpy()):
            raise CheckpointError(
                f"{tensor.path}: {tensor.key!r} has a scale that is NaN or infinite in {tensor.dtype}; download the "
                "checkpoint again"
            )
        return codes


def _moved_columns(source: WeightSource, config: PretrainedConfig, count: int) -> torch.Tensor | None:
    """Return, for each of the `count` columns of a weight, the number of the column in the file. Return None if both
    have the same order."""
    if source.arrangement is None or not source.arrangement.moves_columns:
        return None
    return source.arrangement.whole([torch.arange(count).unsqueeze(0)], config)[0]


def _key_of(sources: Mapping[str, WeightSource], name: str) -> str:
    """Return a weight's name in the file, for messages."""
    return ", ".join(sources[name].keys) if name in sources else name


def _room(weight: torch.Tensor, stays_quantised: bool, is_wide: bool) -> torch.Tensor:
    """Return a tensor into which a weight can be read. For a weight that stays quantized it is a placeholder without
    memory."""
    dtype = torch.float32 if is_wide else weight.dtype
    if stays_quantised:
        return torch.zeros((), dtype=dtype).expand(weight.shape)
    return torch.empty(weight.shape, dtype=dtype)
