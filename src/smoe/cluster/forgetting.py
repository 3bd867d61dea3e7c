"""What this machine keeps of a cluster, or of one of its workers, is deleted: keys and state.

A worker on another machine keeps its own keys, which are good no longer.
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
    """Delete everything stored for it here, as its coordinator or as a worker; returns what it was, in words.

    Raises `ClusterError` where there is none, or where it is in use.
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
    """One worker, which is let in no longer; says what it was, in words. Raises `ClusterError` where main knows no such
    worker."""
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
    """The folders of those that `smoe cluster up` has made on this machine."""
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
