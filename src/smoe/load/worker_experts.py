"""Opens a model's experts for a worker of a cluster."""

from __future__ import annotations

from pathlib import Path

import torch

from smoe.cluster.worker import Served
from smoe.config import EngineConfig
from smoe.errors import UnsupportedModelError
from smoe.load.clustered import experts_alone
from smoe.load.experts_math import experts_math, on_workers
from smoe.load.host_slots import worker_sizes
from smoe.load.ledger import demand_of, open_store
from smoe.models.checkpoint import whole_checkpoint
from smoe.models.read_spec import read_spec
from smoe.models.weight_samples import checksum

_CPU = torch.device("cpu")


def open_experts(model: str | Path, memory_bytes: int | None, config: EngineConfig, slots: int | None = None) -> Served:
    """Return the service that computes a model's experts for a worker. Only headers are read.

    The service has slots for as many experts as `memory_bytes` can hold, or `slots` of every size; one of the two
    arguments is None. Raises `ModelError` and `ConfigError`. Raises `BudgetError` if the memory cannot hold two
    experts: one that is read and one that is computed.
    """
    spec = read_spec(model, config)
    checkpoint = whole_checkpoint(model, None)
    store = open_store(checkpoint, spec, checkpoint.experts(spec), _CPU)
    classes = demand_of(spec, config, _CPU, store).all_classes
    sizes = worker_sizes(classes, memory_bytes, slots)
    math = experts_math(spec.shell, spec, store, on_workers(config))
    if not all(layer.is_movable for layer in math.values()):
        raise UnsupportedModelError(
            "the experts of this family end in a norm whose weights only the coordinator has, so a worker cannot "
            "compute them"
        )
    weights = checksum(checkpoint.place)
    alone = experts_alone(store, math, classes, sizes, config)
    return Served(alone, weights, spec.precision, spec.dtype.torch, str(spec.dtype.torch))
