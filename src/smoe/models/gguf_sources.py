"""Finds the stored tensors of each non-expert weight of transformers in a GGUF file. For experts see
`gguf_experts.py`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from gguf import MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.registry import FORMATS
from smoe.memory.safetensors_index import StoredTensor
from smoe.models.gguf_experts import check_shape
from smoe.models.gguf_family import Arrangement, Entries, GgufFamily

_IN_LAYER = re.compile(r"(?:model\.layers|transformer\.blocks)\.(\d+)\.(.*)")
_CORRECTION = re.compile(r".*\be_score_correction_bias")
"""A pattern for the name of a router's score correction in transformers: a buffer, or a part of the block."""


class WeightSource(NamedTuple):
    """The stored tensors from which a transformers weight is made, and their conversion."""

    keys: tuple[str, ...]
    """The keys of the tensors; empty for a weight that follows from the configuration."""
    arrangement: Arrangement | None = None
    """The conversion; None if the weight is a stored tensor itself."""

    def whole(self, tensors: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> StoredTensor | None:
        """Return the weight as one quantized matrix (with type, shape and bytes only), or None if it cannot stay
        quantized."""
        parts = [tensors[key] for key in self.keys]
        first = parts[0]
        if self.arrangement is None:
            return first if first.dtype in FORMATS else None
        stays = self.arrangement.moves_rows or self.arrangement.moves_columns
        if not stays or any(part.dtype != first.dtype for part in parts) or first.dtype not in FORMATS:
            return None
        rows = sum(math.prod(part.shape[:-1]) for part in parts)
        return replace(first, shape=shape, nbytes=sum(part.nbytes for part in parts) * shape[0] // rows)

    def check_shape(self, tensors: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> None:
        """Raise `CheckpointError` if the weight that the tensors form does not have this shape."""
        parts = [tensors[key] for key in self.keys]
        if self.arrangement is None:
            check_shape(parts[0], shape)
        elif self.arrangement.is_computed:
            return
        elif not _fit([math.prod(part.shape) for part in parts], math.prod(shape), self.arrangement.is_part):
            raise CheckpointError(
                f"the tensors {', '.join(map(repr, self.keys))} in {parts[0].path} have the shapes "
                f"{', '.join(str(list(part.shape)) for part in parts)}; by the file's metadata they should have "
                f"the shape {list(shape)} together; download it again"
            )


def _fit(parts: list[int], whole: int, is_part: bool) -> bool:
    """Return whether tensors with the numbers of elements `parts` can form a weight with `whole` elements. `is_part`:
    whether the weight consists of only some rows of the tensors."""
    return sum(parts) == whole or (is_part and sum(parts) > whole)


def sources_of(family: GgufFamily, entries: Entries, names: Iterable[str], layers: int) -> dict[str, WeightSource]:
    """Return the stored tensors from which each of the weights `names` is made, whether the file contains them or not.
    `layers`: the number of layers."""
    table = _package_names(family.named_as or entries.architecture, layers)
    return {name: _source(family, entries, name, table) for name in names}


def _source(family: GgufFamily, entries: Entries, name: str, table: TensorNameMap | None) -> WeightSource:
    match = _IN_LAYER.fullmatch(name)
    prefix, rest = (f"blk.{match[1]}.", match[2]) if match else ("", name)
    arrangement = family.arrangements.get(rest)
    if arrangement is not None and arrangement.is_computed:
        return WeightSource((), arrangement)
    key = _own_key(family, prefix, rest, name, table)
    if arrangement is not None and arrangement.sources:
        keys = tuple(prefix + source for source in arrangement.sources)
        return WeightSource(keys, arrangement) if key is None or key not in entries.tensors else WeightSource((key,))
    if key is None:
        raise UnsupportedModelError(
            f"the gguf package has no name for the parameter {name!r} of the architecture {entries.architecture!r}, "
            "so smoe cannot read this file"
        )
    return WeightSource((key,), arrangement)


def _own_key(family: GgufFamily, prefix: str, rest: str, name: str, table: TensorNameMap | None) -> str | None:
    """Return the key in the file for the transformers name `name` of a weight, or None if the name cannot be
    translated."""
    if rest in family.names:
        return prefix + family.names[rest]
    if rest in family.shared_names:
        return family.shared_names[rest]
    if prefix and _CORRECTION.fullmatch(rest):
        return f"{prefix}exp_probs_b.bias"
    if table is None:
        return None
    stem, _, suffix = name.rpartition(".")
    key = table.get_name(stem)
    return f"{key}.{suffix}" if key is not None else table.get_name(name)


@lru_cache(maxsize=4)  # a table of 48 layers takes 20 ms
def _package_names(architecture: str, layers: int) -> TensorNameMap | None:
    """Return the gguf package's table of names, or None if the package lacks the architecture."""
    kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    return None if kind is None else get_tensor_name_map(kind, layers)
