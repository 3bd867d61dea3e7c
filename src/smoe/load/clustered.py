"""The cluster behind an engine, where the settings name one, and the experts in main's own hands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedModel

from smoe.compute.expert_math import ExpertMath
from smoe.compute.experts_alone import LEAST_SLOTS, ExpertsAlone
from smoe.config import EngineConfig
from smoe.errors import ConfigError, UnpreparedError
from smoe.expert import EXACT
from smoe.load.activations import activations_of
from smoe.load.check_zmq import check_zmq
from smoe.load.experts_math import experts_math
from smoe.load.host_slots import host_sizes, reads_directly, size_of
from smoe.machine.available_memory import free_device_bytes
from smoe.memory.store import ExpertStore, StoredLayer
from smoe.models.spec import ModelSpec
from smoe.policy.ahead import Here
from smoe.policy.budget import Demand, SlotClass
from smoe.runtime.layer import LayerCompute
from smoe.runtime.running_ahead import ShadowRouting

if TYPE_CHECKING:
    from smoe.cluster.remote import Cluster


def experts_alone(
    store: ExpertStore,
    math: Mapping[int, ExpertMath],
    classes: Sequence[SlotClass],
    sizes: Sequence[tuple[int, int]],
    config: EngineConfig,
) -> ExpertsAlone:
    """`classes`: of the experts' own copies; `sizes`: (slots, bytes of each) of each class."""
    free, _ = free_device_bytes(torch.device("cpu"))
    is_direct = reads_directly(config, store.total_bytes, free - sum(slots * each for slots, each in sizes))
    threads = config.threads or torch.get_num_threads()
    return ExpertsAlone(store, math, sizes, size_of(classes), is_direct, threads)


class ClusterInputs(NamedTuple):
    """What a cluster needs to know of the engine."""

    weights: str
    """The checkpoint's checksum, which workers must have, too."""
    seconds_per_byte: Callable[[], float]
    """Seconds per byte of recent loads here."""
    demand: Demand
    files: Mapping[str, Path]
    """What workers without the checkpoint are sent, by name."""
    stored: Mapping[int, StoredLayer]
    """The experts as the checkpoint has them."""
    shadow: ShadowRouting | None = None
    """What says what a copy that runs ahead does, here or elsewhere."""


def check_cluster(config: EngineConfig) -> None:
    """Before anything is read: raise `ClusterError` where there is no such cluster, `ConfigError` without pyzmq, or for
    what is of a cluster where none is named."""
    if config.cluster is None:
        if config.placement is not None:
            raise UnpreparedError(
                f"`placement` {config.placement} (an option, or part of the presets cluster and od-moe) divides "
                "experts among workers, so it needs a `cluster`: give its name, or use another preset",
                setting="placement",
                given=config.placement,
                allowed="only with `cluster`",
            )
        for name, is_given in {
            "cluster_verify": config.cluster_verify,
            "shadow_on": config.shadow_on == "cluster",
        }.items():
            if is_given:
                raise ConfigError.idle(name, getattr(config, name), "`cluster`")
        return
    check_zmq()
    from smoe.cluster.identity import read_main

    read_main(config.cluster)


def cluster_of(
    model: PreTrainedModel,
    spec: ModelSpec,
    config: EngineConfig,
    store: ExpertStore,
    compute: LayerCompute,
    asked: ClusterInputs,
    made: ExitStack,
) -> Cluster:
    """A listening cluster, with the workers that joined in time; `made` closes it where what follows fails.

    Raises `ClusterError` where the cluster is unknown, its address taken, or too few workers came.
    """
    from smoe.cluster.frames import RowFormat
    from smoe.cluster.identity import read_main
    from smoe.cluster.remote import Cluster

    assert config.cluster is not None
    main = read_main(config.cluster)
    math = _movable_math(model, spec, config, store)
    own = [each for each in asked.demand.all_classes if each.form == EXACT]
    alone = experts_alone(store, math, own, host_sizes(own, 0, LEAST_SLOTS), config)
    same = {"weights": asked.weights, "precision": spec.precision, "dtype": str(spec.dtype.torch)}
    slot_bytes = max(store.slot_bytes.values())
    method, arrivals = config.placement or "finish", compute.arrivals
    staging = sum(pool.staging_slots for pool in arrivals.table.pools)
    cluster = Cluster(
        main,
        alone,
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
        config.shadow_spares or 0,
        config.cluster_verify,
    )
    _furnish(cluster, spec, asked, math, compute.arithmetic, alone.threads)
    made.callback(cluster.close)
    cluster.units.update(compute.units)
    compute.others, compute.units = cluster, cluster.units
    cluster.open(compute.arithmetic)
    _wait_for_workers(cluster, config)
    return cluster


def _movable_math(
    model: PreTrainedModel, spec: ModelSpec, config: EngineConfig, store: ExpertStore
) -> dict[int, ExpertMath]:
    """The arithmetic by layer. Raises `ConfigError` for experts that no other machine can compute."""
    math = experts_math(model, spec, store, activations_of(config, spec.dtype.torch, torch.device("cpu")))
    if not all(layer.is_movable for layer in math.values()):
        raise ConfigError(
            "this family's experts end in a norm that only the coordinator has; it cannot be served by a `cluster`",
            setting="cluster",
            given=config.cluster,
            allowed="none for this model",
        )
    return math


def _furnish(
    cluster: Cluster, spec: ModelSpec, asked: ClusterInputs, math: dict[int, ExpertMath], arithmetic: str, threads: int
) -> None:
    """What workers get in their WELCOME and as files, and the draft model's connection."""
    from smoe.cluster.describing import Describer
    from smoe.cluster.following import Following
    from smoe.cluster.sending import Courier
    from smoe.cluster.shadow_seat import Seat
    from smoe.load.describe import describe

    cluster.describer = Describer(lambda: describe(asked.weights, asked.stored, math, arithmetic, threads))
    ahead = None if asked.shadow is None else asked.shadow.ahead
    cluster.seat = Seat(ahead if isinstance(ahead, Following) else None, {"weights": asked.weights}, cluster)
    cluster.courier = Courier(asked.files, spec.precision, cluster.admitted)


def _wait_for_workers(cluster: Cluster, config: EngineConfig) -> None:
    """Raises `ClusterError` where too few came in time."""
    from smoe.errors import ClusterError

    main = cluster.main
    came = cluster.wait(config.cluster_workers, config.cluster_timeout_seconds)
    if len(came) < config.cluster_workers:
        reasons = "; ".join(f"{name}: {why}" for name, why in cluster.refused.items())
        raise ClusterError(
            f"{len(came)} of {config.cluster_workers} workers of the cluster {main.name!r} came to {main.address} "
            f"within {config.cluster_timeout_seconds:g} s{f' ({reasons})' if reasons else ''}; start them with smoe "
            'cluster up or smoe cluster join and wait until each prints "ready", or raise `cluster_timeout_seconds`',
            setting="cluster_workers",
            given=config.cluster_workers,
            allowed=f"{len(came)} now",
        )


def _most_rows(spec: ModelSpec, config: EngineConfig) -> int:
    """The most rows of one request to a worker: a piece of a prompt through one expert, or every sequence's token
    through all that it chooses."""
    piece = min(config.prefill_tokens, spec.context_tokens * config.max_sequences)
    return max(piece, config.max_sequences * max(spec.anatomy.top_k.values()))
