"""Opens a model's files for a worker without torch, following the coordinator's description
(`cluster/described.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from smoe.cluster.described import NUMBER, Description
from smoe.cluster.worker import Served
from smoe.compute.experts_alone import ExpertsAlone
from smoe.compute.kernel_math import DOWN, UP, KernelMath
from smoe.config import EngineConfig
from smoe.errors import CheckpointError, ConfigError
from smoe.load.host_slots import reads_directly, size_of, worker_sizes
from smoe.machine.available_memory import free_host_bytes
from smoe.machine.processor import usable_cores
from smoe.memory.safetensors_index import StoredTensor, index_checkpoint
from smoe.memory.store import ExpertStore, Part, StoredLayer, row_of
from smoe.models.weight_samples import checksum
from smoe.policy.budget import SlotClass, slot_classes

DTYPE = "torch.bfloat16"
"""The dtype of the experts of such a worker, as the coordinator writes it."""
_PLAIN = "BF16"


def place_of(model: str | Path, precision: str) -> Path:
    """Return the folder of a model on disk.

    Raises `ConfigError` if a worker without torch cannot use the model: if it must be downloaded, if it is not a
    folder, or if a `precision` is set.
    """
    from smoe.models.files import local_place

    if precision != "auto":
        raise ConfigError(
            f"`precision={precision}`: a worker without torch computes experts only in bf16; leave out `precision`, "
            "or install torch",
            setting="precision",
            given=precision,
            allowed="auto without torch",
        )
    place = local_place(model)
    if place is None or not place.is_dir():
        raise ConfigError(
            f"a worker without torch needs the model's folder of safetensors, and {model} is no such folder on this "
            "machine; download the model with `fetch`, or install torch",
            setting="model",
            given=str(model),
            allowed="a folder on this machine",
        )
    return place


def fields_of(place: Path) -> dict[str, str]:
    """Return the fields that a coordinator compares before it sends its description."""
    return {"weights": checksum(place), "precision": "auto", "dtype": DTYPE}


def open_described(
    place: Path,
    description: Description,
    memory_bytes: int | None,
    slots: int | None,
    threads: int | None,
) -> Served:
    """Return the service that computes experts for a worker without torch. Only headers are read. `memory_bytes` and
    `slots` are as in `open_experts`.

    Raises `CheckpointError` if the files do not match the description, and `BudgetError` if the memory is too small.
    """
    store = _store(place, description)
    alone = {
        layer: SlotClass(nbytes, 1, store.layers[layer].experts, (layer,)) for layer, nbytes in store.slot_bytes.items()
    }
    classes = slot_classes(dict.fromkeys(alone, store.expert_bytes), alone)
    sizes = worker_sizes(classes, memory_bytes, slots)
    math = KernelMath(description.hidden, description.inner, description.table)
    free, _ = free_host_bytes()
    is_direct = reads_directly(EngineConfig(), store.total_bytes, free - sum(count * each for count, each in sizes))
    count = threads or usable_cores()
    experts = ExpertsAlone(store, dict.fromkeys(alone, math), sizes, size_of(classes), is_direct, count, False)
    return Served(experts, description.weights, "auto", np.dtype(np.uint16), DTYPE)


def _store(place: Path, description: Description) -> ExpertStore:
    tensors = index_checkpoint(place)
    parts = (
        Part(UP, (2 * description.inner, description.hidden)),
        Part(DOWN, (description.hidden, description.inner)),
    )
    layers = {
        each.layer: StoredLayer(
            each.layer,
            parts,
            [{UP: _pieces(tensors, each.up, n), DOWN: _pieces(tensors, each.down, n)} for n in range(each.experts)],
        )
        for each in description.layers
    }
    return ExpertStore(layers, _PLAIN)


def _pieces(tensors: Mapping[str, StoredTensor], keys: tuple[str, ...], expert: int) -> tuple[StoredTensor, ...]:
    return tuple(_piece(tensors, key, expert) for key in keys)


def _piece(tensors: Mapping[str, StoredTensor], key: str, expert: int) -> StoredTensor:
    name = key.replace(NUMBER, str(expert))
    found = tensors.get(name)
    if found is not None and NUMBER not in key and found.shape and expert < found.shape[0]:
        found = row_of(found, expert)
    if found is None or found.dtype != _PLAIN:
        raise CheckpointError(
            f"the coordinator expects the expert tensor {name!r} in bf16, and this worker's files have no such "
            "tensor; give the worker the same model as the coordinator"
        )
    return found
