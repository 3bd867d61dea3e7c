"""Connects an engine to the workers of a cluster, and prepares the coordinator to compute experts itself if workers
fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.compute.expert_math import ExpertMath
from smoe.compute.experts_alone import LEAST_SLOTS, ExpertsAlone
from smoe.compute.unit import ComputeUnit
from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.expert import EXACT
from smoe.load.experts_math import activations_of, experts_math
from smoe.load.host_slots import host_sizes, reads_directly, size_of
from smoe.machine.available_memory import free_device_bytes
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.spec import ModelSpec
from smoe.policy.ahead import Here
from smoe.policy.budget import Demand, SlotClass
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.running_ahead import DraftRouting

if TYPE_CHECKING:
    from smoe.cluster.admission import Admission
    from smoe.cluster.remote import Cluster, Services


def experts_alone(
    store: ExpertStore,
    math: Mapping[int, ExpertMath],
    classes: Sequence[SlotClass],
    sizes: Sequence[tuple[int, int]],
    config: EngineConfig,
) -> ExpertsAlone:
    """Return the service by which the coordinator computes experts itself if its workers fail. `sizes`: (number of
    slots, bytes per slot) for each size of full-precision experts."""
    free, _ = free_device_bytes(torch.device("cpu"))
    is_direct = reads_directly(config, store.total_bytes, free - sum(slots * each for slots, each in sizes))
    threads = config.threads or torch.get_num_threads()
    return ExpertsAlone(store, math, sizes, size_of(classes), is_direct, threads)


class ClusterInputs(NamedTuple):
    """The data of an engine from which its cluster of workers is set up."""

    weights: str
    """The checkpoint's checksum, which all workers must share."""
    seconds_per_byte: Callable[[], float]
    """A function that returns the seconds per byte of recent loads on this machine."""
    demand: Demand
    stored: Mapping[int, StoredLayer]
    """The stored tensors of the experts, by layer."""
    draft: DraftRouting | None = None
    """The routing of the draft model, on this machine or another; None without one."""


def cluster_of(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    arrivals: Arrivals,
    arithmetic: str,
    units: Mapping[int, ComputeUnit],
    asked: ClusterInputs,
    made: ExitStack,
) -> Cluster:
    """Return a cluster that listens for workers, after waiting for them. `arithmetic`: the kernels that compute experts
    on this machine. `units`: the compute units of this machine. `made` closes the cluster if a later step fails.

    Raises `ClusterError` if the cluster is unknown, if its address is in use, or if too few workers joined in time.
    """
    from smoe.cluster.admission import Admission
    from smoe.cluster.frames import RowFormat
    from smoe.cluster.remote import Cluster
    from smoe.cluster.stored_identity import read_coordinator

    store = arrivals.stores[EXACT]
    math = _movable_math(model, spec, config, store)
    own = [each for each in asked.demand.all_classes if each.form == EXACT]
    alone = experts_alone(store, math, own, host_sizes(own, 0, LEAST_SLOTS), config)
    same = {"weights": asked.weights, "precision": spec.precision, "dtype": str(spec.dtype.torch)}
    slot_bytes = max(store.slot_bytes.values())
    method = config.placement or "finish"
    staging = sum(pool.staging_slots for pool in arrivals.table.pools)
    assert config.cluster is not None
    admission = Admission(read_coordinator(config.cluster))
    try:
        cluster = Cluster(
            admission,
            _services(admission, asked, math, arithmetic, alone.threads),
            alone,
            arithmetic,
            units,
            RowFormat(alone.hidden, spec.dtype.torch, _most_rows(spec, config)),
            same,
            method,
            config.balance_order,
            Here(
                lambda: slot_bytes * asked.seconds_per_byte(),
                lambda: arrivals.counters.kept_share,
                arrivals.table.is_at_hand,
                max(1, staging - 1),
            ),
            config.draft_extra or 0,
            config.cluster_verify,
        )
    except BaseException:
        alone.close()
        raise
    made.callback(cluster.close)
    _wait_for_workers(cluster, config)
    return cluster


def _movable_math(
    model: PreTrainedModel, spec: ModelSpec, config: EngineConfig, store: ExpertStore
) -> dict[int, ExpertMath]:
    """Return the arithmetic of experts by layer. Raise `ConfigError` if other machines cannot compute these experts."""
    math = experts_math(model, spec, store, activations_of(config, spec.dtype.torch, torch.device("cpu")))
    if not all(layer.is_movable for layer in math.values()):
        raise ConfigError(
            "the experts of this family end in a norm whose weights only the coordinator has, so the workers of a "
            "cluster cannot compute them; leave out `cluster`",
            setting="cluster",
            given=config.cluster,
            allowed="none for this model",
        )
    return math


def _services(
    admission: Admission,
    asked: ClusterInputs,
    math: dict[int, ExpertMath],
    arithmetic: str,
    threads: int,
) -> Services:
    """Return what the coordinator does for other machines besides sending requests. `threads`: the number of threads
    that compute the coordinator's own experts."""
    from smoe.cluster.describing import Describer
    from smoe.cluster.draft_session import Seat
    from smoe.cluster.following import Following
    from smoe.cluster.remote import Services
    from smoe.load.describe import describe

    ahead = None if asked.draft is None else asked.draft.ahead
    return Services(
        Describer(lambda: describe(asked.weights, asked.stored, math, arithmetic, threads)),
        Seat(ahead if isinstance(ahead, Following) else None, {"weights": asked.weights}, admission),
    )


def _wait_for_workers(cluster: Cluster, config: EngineConfig) -> None:
    """Wait until enough workers have joined. Raise `ClusterError` if too few did so in time."""
    from smoe.errors import ClusterError

    coordinator = cluster.coordinator
    came = cluster.wait(config.cluster_workers, config.cluster_timeout_seconds)
    if len(came) < config.cluster_workers:
        reasons = "; ".join(f"{name}: {why}" for name, why in cluster.refused.items())
        raise ClusterError(
            f"{len(came)} of {config.cluster_workers} workers of the cluster {coordinator.name!r} connected to "
            f"{coordinator.address} within {config.cluster_timeout_seconds:g} s{f' ({reasons})' if reasons else ''}; "
            'start workers with smoe cluster up or smoe cluster join and wait until each prints "ready", or raise '
            "`cluster_timeout_seconds`",
            setting="cluster_workers",
            given=config.cluster_workers,
            allowed=f"{len(came)} now",
        )


def _most_rows(spec: ModelSpec, config: EngineConfig) -> int:
    """Return the largest number of rows in a request to a worker. It is the larger of two numbers: the tokens of a
    prompt's chunk, which may all pass through one expert; and the number of sequences times the number of experts per
    token."""
    piece = min(config.prefill_tokens, spec.context_tokens * config.max_sequences)
    return max(piece, config.max_sequences * max(spec.anatomy.top_k.values()))
