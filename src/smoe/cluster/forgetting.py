"""Deletes what this machine stores about a cluster, or about one of its workers: keys and state.

A worker on another machine keeps its own keys, which are no longer valid.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace

from smoe.cluster.running import coordinator_process, keeper_process
from smoe.cluster.stored_identity import (
    Coordinator,
    checked_name,
    clusters,
    clusters_folder,
    joined,
    read_coordinator,
    read_worker,
    store_coordinator,
)
from smoe.errors import ClusterError


def forget_cluster(name: str) -> list[str]:
    """Delete the keys and the state that this machine stores about a cluster, as its coordinator or as a worker. Return
    descriptions of the deleted data.

    Raises `ClusterError` if the cluster is unknown or in use.
    """
    checked_name(name, "name")
    if name not in clusters() and name not in joined():
        of_coordinators = {folder for each in clusters() for folder in _local_workers(read_coordinator(each))}
        known = sorted({*clusters(), *joined()} - of_coordinators)
        raise ClusterError(
            f"there is no cluster {name!r} on this machine; there {_are(known)}",
            setting="name",
            given=name,
            allowed=", ".join(known) or "none yet",
        )
    _refuse_in_use(name)
    removed = []
    if name in clusters():
        coordinator, local = read_coordinator(name), []
        for folder in _local_workers(coordinator):
            shutil.rmtree(clusters_folder() / folder)
            local.append(folder)
        of = ", ".join(sorted(coordinator.workers)) or "none yet"
        removed.append(
            f"cluster {name} at {coordinator.address}: the coordinator's keys, and those of its workers ({of})"
        )
        removed += [f"worker {folder}: its keys on this machine" for folder in local if folder != name]
    elif name in joined():
        me = read_worker(name)
        removed.append(f"worker {me.name} of the cluster {name} at {me.address}: its keys on this machine")
    shutil.rmtree(clusters_folder() / name, ignore_errors=True)
    return removed


def forget_worker(name: str, worker: str) -> list[str]:
    """Remove a worker from a cluster, so that the coordinator no longer admits it. Return descriptions of the removed
    data. Raises `ClusterError` for an unknown worker."""
    coordinator = read_coordinator(name, "name")
    if worker not in coordinator.workers:
        known = sorted(coordinator.workers)
        raise ClusterError(
            f"the cluster {name!r} has no worker {worker!r:.80}; there {_are(known)}",
            setting="worker",
            given=worker,
            allowed=", ".join(known) or "none yet",
        )
    others = {each: key for each, key in coordinator.workers.items() if each != worker}
    removed = [f"worker {worker} of the cluster {name}: it is no longer admitted"]
    for folder in _local_workers(coordinator):
        if read_worker(folder).name == worker:
            shutil.rmtree(clusters_folder() / folder)
            removed.append(f"worker {folder}: its keys on this machine")
    store_coordinator(replace(coordinator.with_role(worker, False), workers=others))
    process = coordinator_process(name)
    if process is not None:
        removed.append(f"the coordinator is running (process {process}) and admits it until that process ends")
    return removed


def _local_workers(coordinator: Coordinator) -> list[str]:
    """Return the folders of this cluster's workers that `smoe cluster up` has started on this machine."""
    found = []
    for folder in joined():
        with suppress(ClusterError):  # damaged, so it belongs to no cluster
            if folder != coordinator.name and read_worker(folder).main_key == coordinator.keys.public:
                found.append(folder)
    return found


def _refuse_in_use(name: str) -> None:
    for process, what in (
        (coordinator_process(name), "is its coordinator"),
        (keeper_process(name), "supervises its workers"),
    ):
        if process is not None:
            raise ClusterError(
                f"the cluster {name!r} is in use: process {process} {what}; end that process first",
                setting="name",
                given=name,
                allowed="a cluster that is not in use",
            )


def _are(names: list[str]) -> str:
    return f"are: {', '.join(names)}" if len(names) > 1 else f"is: {names[0]}" if names else "are none yet"
