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
"""transformers' name for the number of multi-token prediction layers, which its models leave out."""
SWITCHES = ("expert_weights_norm",)
"""Metadata entries that are booleans; all others that are read as one value are numbers."""


class Entries(NamedTuple):
    """A file's metadata entries, without the architecture in their names, and its tensors by key."""

    path: Path
    architecture: str
    values: Mapping[str, Any]
    """Metadata values by name; arrays are lists."""
    tensors: Mapping[str, StoredTensor]

    def number(self, key: str, otherwise: Any = None) -> Any:
        """Return an entry that is one number, or one boolean if it is in `SWITCHES`. A list of equal values counts as
        one.

        Raises `CheckpointError` for other values, and for a missing entry without `otherwise`.
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
    """The conversion of stored tensors to a transformers weight that is not simply one stored tensor."""

    whole: Callable[[Sequence[torch.Tensor], Any], torch.Tensor]
    """Returns the weight, given the tensors and the transformers configuration."""
    sources: tuple[str, ...] = ()
    """The names, within a layer, of the tensors to convert. Empty: the tensor that the weight's own name stands for.

    If a tensor is missing, the file stores the weight itself under its own name.
    """
    is_part: bool = False
    """Whether the weight is only a part of the rows of the tensor."""
    moves_rows: bool = False
    """Whether `whole` only moves complete rows. It then also accepts quantized codes, so that the weight stays
    quantized."""


@dataclass(frozen=True)
class GgufFamily:
    """An architecture of GGUF files and the transformers family that computes the same."""

    model_type: str
    """transformers' name of the family."""
    sizes: Mapping[str, str]
    """transformers fields by metadata entry, in addition to the entries of all families."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that no file has, with their values."""
    fixed_yarn: Mapping[str, Any] = field(default_factory=dict)
    """Fields of YaRN-scaled rotary embeddings that no file has, with their values."""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Allowed values of entries whose meaning equals what the transformers family computes."""
    read: frozenset[str] = frozenset()
    """Entries that `complete` reads."""
    complete: Callable[[Entries, dict[str, Any]], None] | None = None
    """Adds to the configuration the fields that need computation."""
    from_tensors: Mapping[str, str] = field(default_factory=dict)
    """Boolean fields that are true if a file has the tensor of this name."""
    has_partial_rotary: bool = False
    """Whether files state which part of a head rotary embeddings rotate."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors by transformers' name within a layer, where the gguf package's name is missing or different."""
    named_as: str = ""
    """The architecture whose tensor names in the gguf package also apply to this one, which the package lacks."""
    arrangements: Mapping[str, Arrangement] = field(default_factory=dict)
    """Arrangements by transformers' name within a layer, or by the full name outside of layers."""
    unread: str = "$^"
    """A regular expression for tensors that transformers' model does not have and text generation does not need."""
    implied: Mapping[str, Callable[[Any], Sequence[float]]] = field(default_factory=dict)
    """Tensors that transformers computes itself, by key, with a function that returns their values."""
    variant: Callable[[Entries], GgufFamily | None] | None = None
    """Returns the description of another transformers family if the file is for that one, else None."""
    split: str | None = "qwen2"
    """The name of the pre-tokenizer (`gguf_splits.py`) if a file has no entry for it; None if all files have one."""


def dense_first(dense: int, count: int) -> list[str]:
    """Return transformers' names of the networks of `count` layers of which the first `dense` have no experts."""
    return ["dense"] * dense + ["sparse"] * (count - dense)
