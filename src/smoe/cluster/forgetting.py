"""Deletes what this machine stores about a cluster, or about one of its workers: keys and state.

A worker on another machine keeps its own keys, which are no longer valid.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace

from smoe.cluster.identity import (
    Main,
    checked_name,
    clusters,
    clusters_folder,
    joined,
    keep_main,
    read_main,
    read_worker,
)
from smoe.cluster.running import keeper_process, main_process
from smoe.errors import ClusterError


def forget_cluster(name: str) -> list[str]:
    """Delete everything that this machine stores about a cluster, as its coordinator or worker. Return descriptions of
    what was deleted.

    Raises `ClusterError` for an unknown cluster, or one in use.
    """
    checked_name(name, "name")
    if name not in clusters() and name not in joined():
        of_mains = {folder for each in clusters() for folder in _local_workers(read_main(each))}
        known = sorted({*clusters(), *joined()} - of_mains)
        raise ClusterError(
            f"there is no cluster {name!r} on this machine; there {_are(known)}",
            setting="name",
            given=name,
            allowed=", ".join(known) or "none yet",
        )
    _refuse_in_use(name)
    removed = []
    if name in clusters():
        main, local = read_main(name), []
        for folder in _local_workers(main):
            shutil.rmtree(clusters_folder() / folder)
            local.append(folder)
        of = ", ".join(sorted(main.workers)) or "none yet"
        removed.append(f"cluster {name} at {main.address}: the coordinator's keys, and those of its workers ({of})")
        removed += [f"worker {folder}: its keys on this machine" for folder in local if folder != name]
    elif name in joined():
        me = read_worker(name)
        removed.append(f"worker {me.name} of the cluster {name} at {me.address}: its keys on this machine")
    shutil.rmtree(clusters_folder() / name, ignore_errors=True)
    return removed


def forget_worker(name: str, worker: str) -> list[str]:
    """Remove one worker, which is no longer admitted. Return descriptions of what was removed. Raises `ClusterError`
    for an unknown worker."""
    main = read_main(name, "name")
    if worker not in main.workers:
        known = sorted(main.workers)
        raise ClusterError(
            f"the cluster {name!r} has no worker {worker!r:.80}; there {_are(known)}",
            setting="worker",
            given=worker,
            allowed=", ".join(known) or "none yet",
        )
    others = {each: key for each, key in main.workers.items() if each != worker}
    removed = [f"worker {worker} of the cluster {name}: it is no longer admitted"]
    for folder in _local_workers(main):
        if read_worker(folder).name == worker:
            shutil.rmtree(clusters_folder() / folder)
            removed.append(f"worker {folder}: its keys on this machine")
    keep_main(replace(main.with_role(worker, False), workers=others))
    process = main_process(name)
    if process is not None:
        removed.append(f"the coordinator is running (process {process}) and admits it until that process ends")
    return removed


def _local_workers(main: Main) -> list[str]:
    """Return the folders of the workers that `smoe cluster up` has made on this machine."""
    found = []
    for folder in joined():
        with suppress(ClusterError):  # damaged, so it belongs to no cluster
            if folder != main.name and read_worker(folder).main_key == main.keys.public:
                found.append(folder)
    return found


def _refuse_in_use(name: str) -> None:
    for process, what in (
        (main_process(name), "is its coordinator"),
        (keeper_process(name), "supervises its workers"),
    ):
        if process is not None:
            raise ClusterError(
                f"the cluster {name!r} is in use: process {process} {what}; end that first",
                setting="name",
                given=name,
                allowed="a cluster that is not in use",
            )


def _are(names: list[str]) -> str:
    return f"are: {', '.join(names)}" if len(names) > 1 else f"is: {names[0]}" if names else "are none yet"
