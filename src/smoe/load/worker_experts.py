"""A model's files opened for a worker of a cluster: its experts, and nothing else of it."""

from __future__ import annotations

from pathlib import Path

import torch

from smoe.cluster.worker import Served
from smoe.config import EngineConfig
from smoe.errors import BudgetError, UnsupportedModelError
from smoe.load.clustered import experts_alone
from smoe.load.experts_math import experts_math
from smoe.load.ledger import demand_of, open_store
from smoe.load.tiers import host_sizes
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.read_spec import read_spec
from smoe.models.weight_samples import checksum
from smoe.units import format_bytes

_CPU = torch.device("cpu")


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
    weights = checksum(checkpoint.place)
    return Served(experts_alone(store, math, classes, memory_bytes, config), weights, spec.precision, spec.dtype)
