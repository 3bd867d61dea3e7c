"""Packing a checkpoint, as `smoe pack` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from smoe.models.checkpoint import checkpoint_at
from smoe.models.packed import Contents, contents_as_they_are, contents_in_precision
from smoe.models.read_spec import read_spec
from smoe.packing.writer import pack
from smoe.presets import configure
from tests import oracle


def pack_folder(
    folder: Path,
    dtype: str = "auto",
    progress: Callable[[int, int], None] = lambda *_: None,
    precision: str | None = None,
) -> Path:
    """The packed file of a folder, written."""
    spec = read_spec(folder, configure(dtype=dtype, context_tokens=oracle.CONTEXT))
    contents = contents_of(folder, dtype, precision)
    pack(folder, contents, checkpoint_at(folder).experts(spec), progress)
    return contents.path(folder)


def contents_of(folder: Path, dtype: str = "auto", precision: str | None = None) -> Contents:
    spec = read_spec(folder, configure(dtype=dtype, context_tokens=oracle.CONTEXT))
    if precision is None:
        contents = contents_as_they_are(spec, checkpoint_at(folder).experts(spec))
        assert contents is not None, "nothing to pack"
        return contents
    return contents_in_precision(spec.sites, precision, spec.config.model_type, spec.own_dtype)
