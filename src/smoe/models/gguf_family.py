"""What an entry of the table of GGUF architectures says (`gguf_families.py`), and what it is given of a file.

Nothing here or in the tables needs torch: `smoe plan` reads them without it.
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
"""The library's name of the number of layers, behind all others, that guess further tokens; it has none of them."""
SWITCHES = ("expert_weights_norm",)
"""Entries that are true or false; all others that are read as one number are numbers."""


class Entries(NamedTuple):
    """What a file has of an architecture: metadata entries by their names without it, and tensors by their keys."""

    path: Path
    architecture: str
    values: Mapping[str, Any]
    """Arrays as lists."""
    tensors: Mapping[str, StoredTensor]

    def number(self, key: str, otherwise: Any = None) -> Any:
        """One number, or one switch. A list that repeats it counts as one. Raises `CheckpointError` for anything else,
        and for an entry that is missing and has no `otherwise`."""
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
        """A number for each of `count` layers: the entries of a list, or one number for all."""
        value = self.values.get(key, otherwise)
        if not isinstance(value, list):
            return [self.number(key, otherwise)] * count
        if len(value) < count or not all(isinstance(each, (int, float)) for each in value):
            raise CheckpointError(
                f"{self.path}: the metadata entry {key!r} should be a list of {count} numbers; it is {value!r:.80}"
            )
        return value[:count]


class Arrangement(NamedTuple):
    """How a weight of the library is made of a file's tensors, where it is not one of them as it lies."""

    whole: Callable[[Sequence[torch.Tensor], Any], torch.Tensor]
    """Makes the weight from the tensors and the library's configuration."""
    sources: tuple[str, ...] = ()
    """The tensors' names in a layer; empty: the one that the weight's own name stands for. Where a file lacks one of
    them, it has the weight under its own name, as the library has it."""
    is_part: bool = False
    """Whether it is only some rows of a tensor that holds others as well."""
    moves_rows: bool = False
    """Whether whole rows move and nothing else, so that quantised ones stay so: `whole` is then given codes as well."""


@dataclass(frozen=True)
class GgufFamily:
    """An architecture of GGUF files, and the library's family that computes the same."""

    model_type: str
    """transformers' name."""
    sizes: Mapping[str, str]
    """The library's name of a size by the metadata entry that says it, besides those that all families have."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What no file says, by the library's name."""
    fixed_yarn: Mapping[str, Any] = field(default_factory=dict)
    """The same of positions that are scaled by YaRN."""
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of entries that mean what the library computes, where other families have others."""
    read: frozenset[str] = frozenset()
    """Entries that `complete` reads."""
    complete: Callable[[Entries, dict[str, Any]], None] | None = None
    """Adds to the fields of a configuration what needs more than a name."""
    from_tensors: Mapping[str, str] = field(default_factory=dict)
    """Settings of the library that are on where a file has a tensor of this name."""
    has_partial_rotary: bool = False
    """Whether positions turn only a part of a head, which files say."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer by the library's name there, where the gguf package has no name or another one."""
    named_as: str = ""
    """The architecture whose names the gguf package has for this one, which it does not know."""
    arrangements: Mapping[str, Arrangement] = field(default_factory=dict)
    """Arrangements by the library's name in a layer, or outside of layers by the whole name."""
    unread: str = "$^"
    """A regular expression: tensors that the library's model has no place for and that texts do not need."""
    implied: Mapping[str, Callable[[Any], Sequence[float]]] = field(default_factory=dict)
    """Tensors that the library computes itself, by their keys, and their numbers by its configuration."""
    variant: Callable[[Entries], GgufFamily | None] | None = None
    """The other family of the library that a file of the architecture may be for, where it is."""
    split: str | None = "qwen2"
    """How a text is split before its merges where a file does not say it; None: files of this family always do."""
