"""Finds the experts among a checkpoint's keys by patterns, for the families of `families.py`.

    ....experts.E.gate_proj.weight, up_proj, down_proj      one tensor for each expert and matrix
    ....experts.E.w1.weight, w3, w2                         the same, by Mixtral's names
    ....experts.gate_up_proj, down_proj                     one tensor for all experts of a layer

For other checkpoints `UndescribedError` is raised, and transformers' own rules are used (`expert_index.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from smoe.formats.registry import FORMATS
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import StoredLayer, row_of
from smoe.models.families import FAMILIES
from smoe.models.outline import ExpertsSite
from smoe.models.plain_config import UndescribedError
from smoe.models.spec import ModelSpec

_OF_ONE = re.compile(r"(?P<module>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight")
_MATRICES = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", 0)),
}
"""{name of an expert's matrix: (the part that contains it, its index within the part)}."""
_FLOATS = ("BF16", "F16", "F32")

Pieces = dict[str, dict[int, StoredTensor]]
"""The stored tensors of one expert: part name -> index within the part -> tensor."""


class Sorted(NamedTuple):
    """The tensors of a checkpoint, divided into tensors of experts and other tensors."""

    experts: Mapping[tuple[str, int], Pieces]
    """Tensors of experts by (module, expert number)."""
    others: Mapping[str, StoredTensor]
    """Other tensors by their transformers names."""


def index_by_keys(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> dict[int, StoredLayer]:
    """Return the stored tensors of every expert, by layer. Raises `UndescribedError` if the files and the model's
    outline differ."""
    found = sorted_by_keys(spec, tensors)
    outline = spec.outline
    missing = outline.stored.keys() - outline.of_experts - found.others.keys()
    if missing:
        raise UndescribedError(f"the tensor {min(missing)!r} is missing")
    for name, tensor in found.others.items():
        if name in outline.tied or (name in outline.stored and not _fits(tensor, outline.stored[name])):
            raise UndescribedError(f"{tensor.key!r}")
    return {site.layer: _layer(site, found.experts) for site in outline.sites}


def layers_by_keys(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the quantized non-expert matrices by their transformers names."""
    weights = spec.outline.weights
    return {
        name: tensor
        for name, tensor in sorted_by_keys(spec, tensors).others.items()
        if name in weights and weights[name].is_plain and tensor.made_of and tensor.made_of[-1].arrangement
    }


def sorted_by_keys(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> Sorted:
    """Return the tensors of a checkpoint, divided by the key patterns of the model's family into tensors of experts and
    other tensors."""
    family, modules = FAMILIES[spec.config.model_type], {site.name: site for site in spec.sites}
    if not family.has_keys:
        raise UndescribedError(f"the keys of {spec.config.model_type}")
    experts: dict[tuple[str, int], Pieces] = {}
    others: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        name = key
        for pattern, replacement in family.keys:
            name = re.sub(pattern, replacement, name)
        match = _OF_ONE.fullmatch(name)
        module, _, part = name.rpartition(".")
        if match is not None:
            site = modules.get(match["module"])  # None: of a layer that is not loaded, as for multi-token prediction
            if site is None or match["matrix"] not in _MATRICES or int(match["expert"]) >= site.experts:
                raise UndescribedError(f"{key!r}")
            part, place = _MATRICES[match["matrix"]]
            experts.setdefault((match["module"], int(match["expert"])), {}).setdefault(part, {})[place] = tensor
        elif module in modules:
            if not tensor.shape or tensor.shape[0] != modules[module].experts:
                raise UndescribedError(f"{key!r}")
            for expert in range(tensor.shape[0]):
                experts.setdefault((module, expert), {}).setdefault(part, {})[0] = row_of(tensor, expert)
        else:
            others[name] = tensor
    return Sorted(experts, others)


def _fits(tensor: StoredTensor, shape: tuple[int, ...]) -> bool:
    return tensor.shape == shape and (tensor.dtype in _FLOATS or bool(tensor.made_of))


def _layer(site: ExpertsSite, experts: Mapping[tuple[str, int], Pieces]) -> StoredLayer:
    sources: list[dict[str, tuple[StoredTensor, ...]]] = []
    for expert in range(site.experts):
        of = experts.get((site.name, expert), {})
        pieces = {
            part.name: tuple(of.get(part.name, {})[n] for n in sorted(of.get(part.name, {}))) for part in site.parts
        }
        if not all(pieces.values()) or any(len({each.shape for each in part}) > 1 for part in pieces.values()):
            raise UndescribedError(f"tensors of expert {expert} of layer {site.layer} are missing, or differ in shape")
        sources.append(pieces)
    parts = tuple(
        # quantized matrices store one output per row, whatever transformers does
        replace(part, is_turned=part.name in site.transposed and sources[0][part.name][0].dtype in FORMATS)
        for part in site.parts
    )
    return StoredLayer(site.layer, parts, sources)
