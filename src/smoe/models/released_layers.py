"""Loads the non-expert layers of a quantized checkpoint. Plain linear layers stay quantized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedModel

from smoe.errors import CheckpointError
from smoe.formats.registry import FORMATS
from smoe.memory.safetensors_index import StoredTensor
from smoe.memory.tensor_bytes import assembled
from smoe.models.dense import built_of, check_loaded, move_to_own_memory, quiet_library
from smoe.models.expert_index import parameter_names, stored_as
from smoe.models.experts import without_weights_on_disk
from smoe.models.files import naming
from smoe.models.load_observer import OnBytes, WeightBytes
from smoe.models.quantised_linear import can_stay_quantised, keep_quantised, layers_of_weights
from smoe.models.reference import stored_numbers
from smoe.models.spec import LibrarySpec


def quantised_layers(spec: LibrarySpec, matrices: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the matrices that stay quantized, by their transformers names."""
    found = {}
    experts, known = {site.name for site in spec.sites}, spec.shell.state_dict()
    quantised = [key for key, tensor in matrices.items() if tensor.made_of and tensor.made_of[-1].arrangement]
    for key, name in parameter_names(spec.shell, quantised).items():
        owner = name.rpartition(".")[0]
        if name in known and owner not in experts and can_stay_quantised(spec.shell.get_submodule(owner)):
            found[name] = matrices[key]
    return found


def load_released(
    place: Path, spec: LibrarySpec, matrices: Mapping[str, StoredTensor], on_bytes: OnBytes
) -> PreTrainedModel:
    """Return the transformers model with all weights except the experts'. Weights in `spec.dense` stay quantized.
    `on_bytes` receives the progress of reading."""
    stored = _stored(spec, matrices)
    read = WeightBytes(sum(matrices[key].nbytes for key in stored), on_bytes)
    state = _state(spec, matrices, stored, read)
    left_out = without_weights_on_disk(spec.shell, spec.outline.tables)
    with left_out, quiet_library(), naming(f"cannot load the weights in {place}"):
        loaded, report = built_of(state, spec.shell, spec.dtype.torch)
    check_loaded(loaded, report, place, lambda name: stored_as(spec.shell, name, matrices))
    layers = layers_of_weights(loaded)
    for name, tensor in spec.dense.items():
        keep_quantised(loaded, layers[name], FORMATS[tensor.dtype], _blocks(tensor), spec.dtype.torch)
        read.add(tensor.nbytes)
    move_to_own_memory(loaded)  # copies what is left: replaced weights have no memory
    loaded.name_or_path = loaded.config.name_or_path = str(place)  # for messages: the loader was given no name
    if (place / "generation_config.json").exists():
        loaded.generation_config = GenerationConfig.from_pretrained(place, local_files_only=True)
    model: PreTrainedModel = loaded
    return model


def _stored(spec: LibrarySpec, matrices: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return {key: transformers name} of the weights to read. Experts and tables are left out, and so are tensors that
    the model lacks, such as those of multi-token prediction layers."""
    experts, known = {site.name for site in spec.sites}, spec.shell.state_dict().keys() - spec.outline.tables
    names = parameter_names(spec.shell, matrices)
    return {key: name for key, name in names.items() if name in known and name.rpartition(".")[0] not in experts}


def _state(
    spec: LibrarySpec, matrices: Mapping[str, StoredTensor], stored: Mapping[str, str], read: WeightBytes
) -> dict[str, torch.Tensor]:
    """Return the weights `stored` for transformers' loader, by the keys of an unquantized checkpoint. Weights that stay
    quantized get placeholders without memory."""
    shapes = {name: weight.shape for name, weight in spec.shell.state_dict().items()}
    found = {}
    for key, name in stored.items():
        tensor = matrices[key]
        if name in spec.dense:
            found[key] = torch.zeros((), dtype=spec.dtype.torch).expand(shapes[name])
            continue
        if tensor.made_of:
            found[key] = stored_numbers(tensor).to(spec.dtype.torch)
        else:
            with safe_open(tensor.path, framework="pt") as file:
                found[key] = file.get_tensor(tensor.key)
        read.add(tensor.nbytes)
    return found


def _blocks(tensor: StoredTensor) -> torch.Tensor:
    codes = assembled(tensor)
    if not FORMATS[tensor.dtype].is_finite(codes.numpy()):
        raise CheckpointError(
            f"{tensor.path}: {tensor.key!r} has a scale that is NaN or infinite, or a weight that is NaN; download "
            "the checkpoint again"
        )
    return codes
