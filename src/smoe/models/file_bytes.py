"""The size of a model's files on disk. If they are not on disk, it is computed from the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from smoe.formats.mxfp4 import MXFP4_PAIRS
from smoe.memory.dtypes import Dtype
from smoe.memory.store import Part
from smoe.models.outline import ExpertsSite, Outline, Weight
from smoe.models.released_schemes import Scheme


class FileBytes(NamedTuple):
    """The size of a model's files on disk, in bytes."""

    together: int
    experts: int | None = None
    """The bytes of the routed experts; None if the files were measured as a whole."""


def bytes_of_files(paths: Iterable[Path]) -> FileBytes:
    """Return the size of a model whose files are on disk."""
    return FileBytes(sum(path.stat().st_size for path in paths))


def expected_bytes(outline: Outline, dtype: Dtype, scheme: Scheme | None, has_mxfp4: bool) -> FileBytes:
    """Return the expected size in bytes of files that are not on disk.

    Quantized matrices have the checkpoint's format, other weights have `dtype`, and tied weights count once.
    """
    experts = sum(_expert_bytes(site, part, dtype, scheme, has_mxfp4) for site in outline.sites for part in site.parts)
    own = outline.of_experts
    others = sum(
        _layer_bytes(name, weight, dtype, scheme) for name, weight in outline.weights.items() if name not in own
    )
    return FileBytes(experts + others, experts)


def _expert_bytes(site: ExpertsSite, part: Part, dtype: Dtype, scheme: Scheme | None, has_mxfp4: bool) -> int:
    """Return the size in bytes, in the files, of one weight (such as `gate_up_proj`) of all experts of a layer."""
    kind = None if scheme is None else scheme.of_experts(site.name)
    if len(part.shape) == 1 or (kind is None and not has_mxfp4):
        return site.experts * math.prod(part.shape) * dtype.itemsize
    rows, columns = part.shape[::-1] if part.name in site.transposed else part.shape
    return site.experts * (rows * MXFP4_PAIRS.row_bytes(columns) if kind is None else kind.file_bytes(rows, columns))


def _layer_bytes(name: str, weight: Weight, dtype: Dtype, scheme: Scheme | None) -> int:
    """Return the size in bytes, in the files, of one non-expert weight."""
    owner, _, key = name.rpartition(".")
    if scheme is not None and key == "weight" and weight.is_linear:
        kind = scheme.of(owner)
        if kind is not None:
            return kind.file_bytes(*weight.shape)
    return weight.numbers * dtype.itemsize
