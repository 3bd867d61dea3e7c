"""Starts the workers of `smoe cluster up` as processes on this machine, and restarts workers that end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from smoe.cli.interrupts import REFUSED, answered_by, check
from smoe.errors import ClusterError
from smoe.safe_path import WORKING_FOLDER, child_environment

if TYPE_CHECKING:
    from smoe.cluster.stored_identity import Coordinator

_ENDING_SECONDS = 10.0
"""How many seconds a worker gets to end in an orderly way."""
_LEAST_RUN_SECONDS = 5.0
"""A worker that ends by itself sooner than this is not restarted: it would end again. If a signal ends it so soon, it
is restarted once."""


def line_for_coordinator(model: str, name: str, workers: int, draft: bool = False) -> str:
    """Return a command line that runs the coordinator of a cluster. For the demo, the line makes workers take turns:
    otherwise the coordinator's own disk would always be faster than a worker on the same machine."""
    preset = " --preset cluster --set draft_on=cluster" if draft else ""
    line = f"smoe generate {model} --cluster {name}{preset} --set cluster_workers={workers} --memory"
    return f"{line} 24MiB --set placement=round-robin" if model == "demo" else f"{line} SIZE -p TEXT"


def draft_of(name: str) -> str:
    """Return the name that the cluster's own draft model has as a worker."""
    return f"{name}-draft"


def local_workers(name: str, count: int, draft: bool = False) -> tuple[Coordinator, list[str]]:
    """Create the records of `count` workers of a cluster on this machine, and of its draft model if `draft`. This
    process supervises them from now on. Return the cluster and the workers' names. Raises `ClusterError` if another
    process supervises them."""
    from smoe.cluster.running import become_keeper
    from smoe.cluster.stored_identity import (
        KeyPair,
        Worker,
        checked_name,
        clusters,
        keep_worker,
        new_coordinator,
        read_coordinator,
        store_coordinator,
    )

    become_keeper(checked_name(name, "name"))
    coordinator = read_coordinator(name) if name in clusters() else new_coordinator(name)
    names = [f"{name}-{n}" for n in range(1, count + 1)]
    for each in [*names, draft_of(name)] if draft else names:
        me = Worker(each, each, coordinator.address, coordinator.keys.public, KeyPair.new())
        coordinator = coordinator.with_worker(me.name, me.keys.public)
        keep_worker(me)
    store_coordinator(coordinator.with_role(draft_of(name), draft))
    return coordinator, names


def _started(line: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, cwd=WORKING_FOLDER, env=child_environment())


def _final_message(name: str, code: int, is_soon: bool, was_soon: bool) -> str | None:
    """Return why a worker that has ended is not restarted; None if it is restarted.

    `is_soon`: it ended soon after its start; `was_soon`: so did the process before it. A negative code is a signal's.
    """
    if code == REFUSED:
        return f"worker {name} is not started again: the coordinator refused it (see the message above)"
    if is_soon and (code >= 0 or was_soon):
        return f"worker {name} ended at once (exit code {code}) and is not started again"
    return None


def keep_running(lines: Mapping[str, Sequence[str]], on_started: Callable[[], None] = lambda: None) -> None:
    """Start the workers, given as {name: command line}, restart workers that end, and end all of them with this
    process. `on_started` is called when all have been started. A worker that the coordinator refuses, or that ends as
    soon as it is started, is not restarted."""
    from smoe.cli.console import warn

    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    soon = set[str]()
    """The workers whose last process a signal ended soon after its start."""

    def start(name: str) -> None:
        with answered_by(lambda _: None):  # an interrupt between the two steps of this line would lose the process
            running[name] = _started(lines[name]), time.monotonic()
        check()

    try:
        for name in lines:
            start(name)
        on_started()
        while running:
            time.sleep(0.2)
            for name, (process, since) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                is_soon = time.monotonic() - since < _LEAST_RUN_SECONDS
                final = _final_message(name, code, is_soon, name in soon)
                if final is not None:
                    warn(final)
                    del running[name]
                    continue
                (soon.add if is_soon else soon.discard)(name)
                warn(f"worker {name} ended (exit code {code}); it is started again")
                start(name)
        raise ClusterError("no worker is left; the messages above say why each ended")
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            try:
                process.wait(_ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
