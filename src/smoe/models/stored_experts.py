"""The sizes of experts in a quantized checkpoint, computed from its configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from smoe.errors import CheckpointError
from smoe.formats.base import Format
from smoe.memory.dtypes import Dtype
from smoe.models.outline import ExpertsSite


def stored_expert_bytes(
    sites: Sequence[ExpertsSite],
    dtype: Dtype,
    form_of: Callable[[ExpertsSite, int], Format | None],
    config_place: Path,
    blocks: str,
) -> dict[int, int]:
    """Return {layer: bytes of an expert}. Matrices have the format that `form_of` returns, biases have `dtype`.

    `form_of`: takes the experts module and the number of columns. `blocks`: a phrase for messages, which describes the
    required rows. Raise `CheckpointError` if rows are not whole blocks.
    """
    found = {}
    for site in sites:
        found[site.layer] = 0
        for part in site.parts:
            if len(part.shape) == 1:
                found[site.layer] += part.shape[0] * dtype.itemsize
                continue
            rows, columns = part.shape[::-1] if part.name in site.transposed else part.shape
            form = form_of(site, columns)
            if form is None:
                raise CheckpointError(
                    f"by the sizes in {config_place}, the rows of {part.name} have {columns} numbers, and {blocks}; "
                    "download the file again"
                )
            found[site.layer] += rows * form.row_bytes(columns)
    return found
