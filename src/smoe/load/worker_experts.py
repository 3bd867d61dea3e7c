"""A model's files opened for a worker of a cluster, and for main's own hands: its experts, and nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from smoe.cluster.worker import Served
from smoe.compute.expert_math import ExpertMath
from smoe.compute.experts_alone import ExpertsAlone
from smoe.config import EngineConfig
from smoe.errors import BudgetError, UnsupportedModelError
from smoe.load.experts_math import experts_math
from smoe.load.pretrained import demand_of, open_store
from smoe.load.tiers import host_sizes, reads_directly, size_of
from smoe.machine.available_memory import free_device_bytes
from smoe.memory.store import ExpertStore
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.read_spec import read_spec
from smoe.models.weight_samples import checksum
from smoe.policy.budget import SlotClass
from smoe.units import format_bytes

_CPU = torch.device("cpu")


def experts_alone(
    store: ExpertStore,
    math: Mapping[int, ExpertMath],
    classes: Sequence[SlotClass],
    memory_bytes: int,
    config: EngineConfig,
) -> ExpertsAlone:
    """With as many slots as the memory holds, and the few that it takes to work at least; `classes`: of the experts'
    own copies."""
    sizes = host_sizes(classes, memory_bytes, config.io_threads)
    free, _ = free_device_bytes(_CPU)
    is_direct = reads_directly(config, store.total_bytes, free - sum(slots * each for slots, each in sizes))
    threads = config.threads or torch.get_num_threads()
    return ExpertsAlone(store, math, sizes, size_of(classes), is_direct, threads)


def open_experts(model: str | Path, memory_bytes: int, config: EngineConfig) -> Served:
    """For a worker: nothing but experts is read. Raises `ModelError`, `ConfigError`, and `BudgetError` where the memory
    holds fewer than it takes to work."""
    spec = read_spec(model, config)
    checkpoint = whole_checkpoint(model, None)
    store = open_store(checkpoint, spec, checkpoint.experts(spec), _CPU)
    classes = demand_of(spec, config, _CPU, store).all_classes
    least = sum(slots * each for slots, each in host_sizes(classes, 0, config.io_threads))
    if memory_bytes < least:
        raise BudgetError(
            f"a worker of this model needs {format_bytes(least)} for experts at least, {format_bytes(memory_bytes)} "
            "were given; give it more, or fewer reading threads (`io_threads` 1)"
        )
    math = experts_math(spec.shell, spec, store, config.activations)
    if not all(layer.is_movable for layer in math.values()):
        raise UnsupportedModelError("this family's experts end in a norm that only the main machine has")
    alone = experts_alone(store, math, classes, memory_bytes, config)
    return Served(alone, checksum(checkpoint.place), spec.precision, spec.dtype)
