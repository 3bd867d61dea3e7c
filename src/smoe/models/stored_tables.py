"""Finds the rows of large tables in a checkpoint's files: embeddings that stay on disk (`Outline.tables`).

A table is one tensor, or several with consecutive rows, whose keys are numbered in the order of the rows. The
n-gram table of Qwen3.8-Flash-Next, for example, has 512 tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.plain import PLAIN
from smoe.formats.registry import FORMATS
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.stored_rows import StoredRows
from smoe.models.expert_index import parameter_names
from smoe.models.quantised_linear import keep_on_disk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from smoe.models.spec import LibrarySpec

Tables = Mapping[str, tuple[StoredTensor, ...]]
"""{name of a table: its tensors in the order of the rows}."""


def stored_tables(spec: LibrarySpec, tensors: Mapping[str, StoredTensor]) -> Tables:
    """Return the tensors of every table of a checkpoint in safetensors files. Raises the errors of `check_table`."""
    found: dict[str, list[str]] = defaultdict(list)
    for key, name in parameter_names(spec.shell, tensors).items() if spec.outline.tables else ():
        if name in spec.outline.tables:
            found[name].append(key)
    tables = {name: tuple(tensors[key] for key in sorted(keys, key=_numbers)) for name, keys in found.items()}
    for name, parts in tables.items():
        check_table(parts, spec.outline.weights[name].shape)
    return tables


def _numbers(key: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", key)]


def check_table(parts: Iterable[StoredTensor], shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` if tensors do not form a table of this shape, and `UnsupportedModelError` if its rows
    cannot be read one by one."""
    rows, first = 0, None
    for part in parts:
        first = first or part
        if len(part.shape) != 2 or part.shape[1] != shape[1] or part.dtype != first.dtype:
            raise CheckpointError(
                f"{part.path}: the tensor {part.key!r} is {part.dtype}{list(part.shape)}; as a part of a table it "
                f"should be {first.dtype} with {shape[1]} columns: download the checkpoint again"
            )
        if part.made_of or not (part.dtype in PLAIN or part.dtype in FORMATS):
            raise UnsupportedModelError(
                f"{part.path}: rows of the tensor {part.key!r} in {part.dtype} cannot be read one by one; take another "
                "release of the model"
            )
        rows += part.shape[0]
    if first is not None and rows != shape[0]:
        raise CheckpointError(
            f"{first.path}: the tensors of the table that begins with {first.key!r} have {rows} rows together, but by "
            f"config.json it has {shape[0]}; download the checkpoint again"
        )


def keep_tables_on_disk(model: PreTrainedModel, tables: Tables, spec: LibrarySpec) -> None:
    """Replace the tables of `model` by embeddings that read rows from disk."""
    for name, parts in tables.items():
        form = PLAIN.get(parts[0].dtype) or FORMATS[parts[0].dtype]
        keep_on_disk(model, name, form, StoredRows(*parts), spec.dtype.torch)
