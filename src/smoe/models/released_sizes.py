"""The sizes of a quantized checkpoint's matrices, computed from its configuration alone."""

from __future__ import annotations

from pathlib import Path

from smoe.errors import UnsupportedModelError
from smoe.formats.base import Format
from smoe.memory.safetensors_index import StoredTensor
from smoe.models.outline import ExpertsSite
from smoe.models.released_schemes import Scheme
from smoe.models.spec import ModelSpec
from smoe.models.stored_experts import stored_expert_bytes


def expected_layers(spec: ModelSpec, scheme: Scheme, place: Path) -> dict[str, StoredTensor]:
    """Return the linear layers that should stay quantized, by their transformers names, for a checkpoint that is not on
    disk.

    They have the right shape and format but no valid offset. In the published files, more layers may be unquantized.
    """
    found = {}
    for name, weight in spec.outline.weights.items():
        owner, _, key = name.rpartition(".")
        its = scheme.of(owner) if weight.is_linear and weight.is_plain and key == "weight" else None
        form = None if its is None else its.form(weight.shape[1])
        if form is not None:
            nbytes = weight.shape[0] * form.row_bytes(weight.shape[1])
            found[name] = StoredTensor(place, 0, nbytes, form.name, weight.shape)
    return found


def released_expert_bytes(spec: ModelSpec, scheme: Scheme, place: Path) -> dict[int, int] | None:
    """Return {layer: bytes of an expert in a slot}, from config.json. Return None if no experts are quantized.

    Raise `UnsupportedModelError` if only some layers' experts are quantized.
    """
    kinds = {site.name: scheme.of_experts(site.name) for site in spec.sites}
    in_full = [name for name, kind in kinds.items() if kind is None]
    if len(in_full) == len(kinds):
        return None
    if in_full:
        raise UnsupportedModelError(
            f"{place}: the experts of {len(kinds) - len(in_full)} layers are quantised, those of {len(in_full)} "
            f"({in_full[0]} first) are not; smoe reads models whose experts are all quantised, or none: take another "
            "release of the model"
        )

    def form_of(site: ExpertsSite, columns: int) -> Format | None:
        kind = kinds[site.name]
        return None if kind is None else kind.form(columns)

    group = next(kind for kind in kinds.values() if kind is not None).columns_each
    return stored_expert_bytes(spec.sites, spec.dtype, form_of, place, f"scales are for {group or 'all'} of them")
