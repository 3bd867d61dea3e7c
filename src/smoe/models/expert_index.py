"""Finds the experts among a checkpoint's keys by transformers' own rules for renaming and converting keys.

Two forms are supported: one tensor for each expert and matrix, which a `WeightConverter` merges, and fused tensors with
the experts in the first dimension. For other conversions an error with their name is raised.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from smoe.errors import CheckpointError, UnsupportedModelError
from smoe.formats.registry import FORMATS
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.store import StoredLayer, row_of
from smoe.models.outline import ExpertsSite
from smoe.models.released_schemes import METHODS

_MERGING = {"MergeModulelist", "Concatenate", "ExpertsOfRows"}
_TURNING = {"Transpose"}
"""Conversions that transpose fused tensors. Such tensors are used as they are stored if the products have the same bits
(`load/selftest.py`)."""
_FLOATS = ("BF16", "F16", "F32", "F64")


def index_experts(
    folder: Path, model: PreTrainedModel, sites: Sequence[ExpertsSite], tensors: Mapping[str, StoredTensor]
) -> dict[int, StoredLayer]:
    """Return the stored tensors of every expert, by layer. `model` may be on the meta device, and must have its
    experts.

    Raise `CheckpointError` if names or shapes in the checkpoint differ from those of the model, for experts or for
    other weights. transformers itself would allocate and initialize missing weights.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    converter_of = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    wanted = {f"{site.name}.{part.name}": (site, part.name) for site in sites for part in site.parts}
    reached: set[str] = set()
    turned: set[tuple[int, str]] = set()
    found: dict[tuple[int, str], dict[int, list[tuple[int, StoredTensor]]]] = defaultdict(lambda: defaultdict(list))
    for key, tensor in tensors.items():
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        reached.add(target)
        if target not in wanted:
            if pattern is None and target in state:
                _check_dense(key, tensor, state[target])
            continue
        site, part = wanted[target]
        pieces = found[site.layer, part]
        if pattern is None:
            _check_rows(tensor, part in site.transposed)
            for expert in range(_fused_experts(site, tensor)):
                pieces[expert].append((0, row_of(tensor, expert)))
        else:
            converter = converter_of[pattern]
            _check_operations(converter, key)
            if _is_turned(converter, tensor, state[target]):
                _check_rows(tensor, is_turned=True)
                turned.add((site.layer, part))
            place = converter.source_patterns.index(pattern)
            for expert, piece in _of_experts(key, tensor, site, converter):
                pieces[expert].append((place, piece))
    layers = {site.layer: _layer(folder, site, found, turned) for site in sites}
    if not any(len(converter.target_patterns) > 1 for converter in converters):  # their targets are unknown
        _check_whole(folder, model, reached)
    return layers


def stored_as(model: PreTrainedModel, name: str, tensors: Mapping[str, StoredTensor]) -> str:
    """Return file and key of the parameter `name`, for messages. If no key belongs to it, return the quoted name."""
    key = next((key for key, target in parameter_names(model, tensors).items() if target == name), None)
    return repr(name) if key is None else f"{key!r} in {tensors[key].path}"


def parameter_names(model: PreTrainedModel, tensors: Iterable[str]) -> dict[str, str]:
    """Return {key of the checkpoint: name of the transformers parameter that it is renamed to or merged into}."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()
    return {key: rename_source_key(key, renamings, converters, model.base_model_prefix, state)[0] for key in tensors}


def _check_dense(key: str, tensor: StoredTensor, parameter: torch.Tensor) -> None:
    if tensor.shape != tuple(parameter.shape):
        raise CheckpointError(
            f"the tensor {key!r} in {tensor.path} has the shape {list(tensor.shape)}, but by config.json it has the "
            f"shape {list(parameter.shape)}; download the checkpoint again"
        )
    if parameter.is_floating_point() and tensor.dtype not in _FLOATS and not tensor.made_of:
        raise CheckpointError(
            f"the tensor {key!r} in {tensor.path} has the data type {tensor.dtype}, which is not a floating-point "
            f"type; smoe reads {', '.join(_FLOATS)}"
        )


def missing_weights(model: PreTrainedModel, reached: Set[str]) -> list[str]:
    """Return the names of parameters of `model` for which the checkpoint has no tensor, directly or through a tied
    parameter."""
    names_of: dict[torch.nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    optional = "|".join(model._keys_to_ignore_on_load_missing or ())
    return [
        names[0]
        for names in names_of.values()
        if reached.isdisjoint(names) and not (optional and re.search(optional, names[0]))
    ]


def _check_whole(folder: Path, model: PreTrainedModel, reached: Set[str]) -> None:
    missing = missing_weights(model, reached)
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} weights that config.json requires, beginning with {missing[0]!r}; the "
            "checkpoint is incomplete: download it again"
        )


def _fused_experts(site: ExpertsSite, tensor: StoredTensor) -> int:
    if not tensor.shape or tensor.shape[0] != site.experts:
        raise CheckpointError(
            f"the tensor {tensor.key!r} in {tensor.path} should have {site.experts} experts in its first dimension, "
            f"but its shape is {list(tensor.shape)}; download the checkpoint again"
        )
    return site.experts


def _check_rows(tensor: StoredTensor, is_turned: bool) -> None:
    if is_turned and tensor.scheme in METHODS:
        raise UnsupportedModelError(
            f"{tensor.path}: the tensor {tensor.key!r} holds quantised matrices of all experts with one output per "
            "column; smoe reads only matrices with one output per row: take another release of the model"
        )


def _operations(converter: WeightConverter) -> set[str]:
    return {type(operation).__name__ for operation in converter.operations}


def _is_turned(converter: WeightConverter, tensor: StoredTensor, parameter: torch.Tensor) -> bool:
    """Return whether transformers transposes the matrices of a fused tensor: always, or only if their shapes in the
    file and in the model differ."""
    if _operations(converter) != _TURNING:
        return False
    return tensor.shape != tuple(parameter.shape) or not getattr(converter.operations[0], "check_dims", False)


def _check_operations(converter: WeightConverter, key: str) -> None:
    odd = sorted(_operations(converter) - _MERGING)
    if odd and _operations(converter) != _TURNING:
        raise UnsupportedModelError(
            f"the tensor {key!r} needs the conversion {odd[0]} of transformers, which smoe cannot apply to a single "
            "expert, so this model cannot be served"
        )


def _of_experts(
    key: str, tensor: StoredTensor, site: ExpertsSite, converter: WeightConverter
) -> Iterator[tuple[int, StoredTensor]]:
    """Yield (expert number, tensor) pairs from a stored tensor, which belongs to one expert or has a slice for each
    expert."""
    if _operations(converter) == _TURNING:
        yield from ((expert, row_of(tensor, expert)) for expert in range(_fused_experts(site, tensor)))
        return
    if "ExpertsOfRows" not in _operations(converter):
        yield _expert_number(key, tensor, site), tensor
        return
    rows, *columns = tensor.shape or (0,)
    whole = replace(tensor, shape=(site.experts, rows // site.experts, *columns))
    if rows % site.experts:
        raise CheckpointError(
            f"the tensor {key!r} in {tensor.path} should have rows for {site.experts} experts, but its shape is "
            f"{list(tensor.shape)}; download the checkpoint again"
        )
    yield from ((expert, row_of(whole, expert)) for expert in range(site.experts))


def _expert_number(key: str, tensor: StoredTensor, site: ExpertsSite) -> int:
    match = re.search(r"experts\.(\d+)\.", key)
    if match is None:
        raise UnsupportedModelError(
            f"the name of the experts' tensor {key!r} contains no expert number, so smoe cannot read this checkpoint"
        )
    if int(match[1]) >= site.experts:
        raise CheckpointError(
            f"the tensor {key!r} in {tensor.path} belongs to one expert too many: by config.json a layer has "
            f"{site.experts}; download the checkpoint again"
        )
    return int(match[1])


def _check_like(pieces: Sequence[StoredTensor]) -> None:
    """Raise `CheckpointError` if matrices that transformers concatenates (gate and up) differ in shape."""
    for piece in pieces[1:]:
        if piece.shape != pieces[0].shape:
            raise CheckpointError(
                f"{piece.path}: the tensors {piece.key!r} and {pieces[0].key!r} must have the same shape, but have "
                f"the shapes {list(piece.shape)} and {list(pieces[0].shape)}; download the checkpoint again"
            )


def _layer(
    folder: Path,
    site: ExpertsSite,
    found: Mapping[tuple[int, str], Mapping[int, list[tuple[int, StoredTensor]]]],
    turned: Set[tuple[int, str]],
) -> StoredLayer:
    sources: list[dict[str, tuple[StoredTensor, ...]]] = []
    for expert in range(site.experts):
        pieces: dict[str, tuple[StoredTensor, ...]] = {}
        for part in site.parts:
            entries = found.get((site.layer, part.name), {}).get(expert)
            if not entries:
                raise CheckpointError(
                    f"{folder} has no {part.name} for expert {expert} of layer {site.layer} ({site.name}), which "
                    "config.json requires; the checkpoint is incomplete, or quantised in a form that smoe does not "
                    "read"
                )
            pieces[part.name] = tuple(tensor for _, tensor in sorted(entries, key=lambda entry: entry[0]))
            _check_like(pieces[part.name])
        sources.append(pieces)
    parts = tuple(
        # quantized matrices store one output per row, whatever transformers does
        replace(part, is_turned=part.name in site.transposed)
        if sources[0][part.name][0].dtype in FORMATS
        else replace(part, is_turned=(site.layer, part.name) in turned)
        for part in site.parts
    )
    return StoredLayer(site.layer, parts, sources)
