"""The types of the tables in `gguf_families.py`: the description of an architecture, and the entries of a file.

This module and the tables do not import torch, because `smoe plan` reads them without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smoe.errors import CheckpointError
from smoe.memory.safetensors_index import StoredTensor
from smoe.models.config_file import check_number

if TYPE_CHECKING:
    import torch

NEXT_TOKEN_LAYERS = "num_nextn_predict_layers"
"""The name in transformers of the number of multi-token prediction layers, which its models leave out."""
SWITCHES = ("expert_weights_norm",)
"""Metadata entries that are booleans. All others that are read as a single value are numbers."""


class Entries(NamedTuple):
    """A file's metadata entries, named without the architecture, and its tensors by key."""

    path: Path
    architecture: str
    values: Mapping[str, Any]
    """Metadata values by name; arrays are lists."""
    tensors: Mapping[str, StoredTensor]

    def number(self, key: str, otherwise: Any = None) -> Any:
        """Return a metadata entry that is a single number, or a boolean if the entry is in `SWITCHES`. A list of equal
        values counts as one value.

        Raise `CheckpointError` for other values, and if the entry is missing and `otherwise` is not given.
        """
        value = self.values.get(key, otherwise)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is None:
            raise CheckpointError(
                f"{self.path} lacks the metadata entry '{self.architecture}.{key}'; download it again"
            )
        if isinstance(value, bool) != (key in SWITCHES) or not isinstance(value, (int, float)):
            what = "true or false" if key in SWITCHES else "one number"
            raise CheckpointError(f"{self.path}: the metadata entry {key!r} should be {what}; it is {value!r:.80}")
        check_number(key, value, self.path)
        return value

    def numbers(self, key: str, count: int, otherwise: Any = None) -> list[Any]:
        """Return one number for each of `count` layers, from a list or from a single number."""
        value = self.values.get(key, otherwise)
        if not isinstance(value, list):
            return [self.number(key, otherwise)] * count
        if len(value) < count or not all(isinstance(each, (int, float)) for each in value):
            raise CheckpointError(
                f"{self.path}: the metadata entry {key!r} should be a list of {count} numbers; it is {value!r:.80}"
            )
        return value[:count]


class Arrangement(NamedTuple):
    """The conversion of stored tensors to a transformers weight, for weights that are not simply one of the stored
    tensors."""

    whole: Callable[[Sequence[torch.Tensor], Any], torch.Tensor]
    """Takes the tensors and the transformers configuration; returns the weight."""
    sources: tuple[str, ...] = ()
    """The names, within a layer, of the tensors to convert; empty: the tensor that belongs to the weight's own name. If
    a tensor is missing, the file stores the weight itself under its own name."""
    is_part: bool = False
    """Whether the weight consists of only some rows of the tensor."""
    is_computed: bool = False
    """Whether the weight follows from the configuration alone, and the file has no tensor for it."""
    moves_rows: bool = False
    """Whether `whole` only moves complete rows. Then it can also be applied to quantized codes, so that the weight
    stays quantized."""
    moves_columns: bool = False
    """Whether `whole` only moves complete columns of one matrix. Then the weight stays quantized with its columns in
    the file's order, and the layer puts its input into that order."""


@dataclass(frozen=True)
class GgufFamily:
    """An architecture of GGUF files, and the transformers family that computes the same function."""

    model_type: str
    """The name of the family in transformers."""
    sizes: Mapping[str, str]
    """{metadata entry: transformers field}, in addition to those of all families."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that no file contains, with their values."""
    fixed_yarn: Mapping[str, Any] = field(default_factory=dict)
    """Fields of YaRN-scaled rotary embeddings that no file contains, with their values."""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """{entry: values for which the transformers family computes the same}, in addition to those that are allowed
    everywhere."""
    read: frozenset[str] = frozenset()
    """Entries that `complete` reads."""
    complete: Callable[[Entries, dict[str, Any]], None] | None = None
    """A function that adds the fields that must be computed to the configuration."""
    from_tensors: Mapping[str, str] = field(default_factory=dict)
    """{boolean field: name of a tensor}. The field is true if the file has the tensor."""
    has_partial_rotary: bool = False
    """Whether files contain the fraction of a head that rotary embeddings rotate."""
    names: Mapping[str, str] = field(default_factory=dict)
    """{transformers' name within a layer: name of the tensor}, if the gguf package lacks the name or has another
    one."""
    shared_names: Mapping[str, str] = field(default_factory=dict)
    """{transformers' name within a layer: name of the tensor}, if the tensor's name does not contain the layer."""
    named_as: str = ""
    """For an architecture that the gguf package lacks: another architecture with the same tensor names."""
    arrangements: Mapping[str, Arrangement] = field(default_factory=dict)
    """{transformers' name of a weight: arrangement}. The name is relative to the layer; outside of layers it is
    complete."""
    unread: str = "$^"
    """A regular expression for tensors that transformers' model lacks and that text generation does not need."""
    implied: Mapping[str, Callable[[Any], Sequence[float]]] = field(default_factory=dict)
    """{key of a tensor: function that returns its values}, for tensors that transformers computes by itself."""
    variant: Callable[[Entries], GgufFamily | None] | None = None
    """A function that returns the description of another transformers family if the file needs that one, otherwise
    None."""
    split: str | None = "qwen2"
    """The name of the pre-tokenizer (`gguf_splits.py`) if a file does not name one; None if all files name one."""


def dense_first(dense: int, count: int) -> list[str]:
    """Return transformers' names of the types of feed-forward networks, dense or sparse, for `count` layers. The first
    `dense` layers have no experts."""
    return ["dense"] * dense + ["sparse"] * (count - dense)
