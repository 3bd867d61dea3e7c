"""Finds the processes of this machine that run for a cluster: its coordinator, and the supervisor of its workers."""

from __future__ import annotations

import os
import time

import psutil

from smoe.cluster.stored_identity import keep_keeper, read_keeper, read_status
from smoe.errors import ClusterError

_STATUS_SECONDS = 3.0
"""The largest age in seconds of a stored state that still shows a running coordinator: a running coordinator stores its
state more often."""
_SAME_SECONDS = 60.0
"""The tolerance for a process's start time. A process with the stored number but another start time is a different one.
The system's figure follows its clock, which may be adjusted."""


def coordinator_process(name: str) -> int | None:
    """Return the number of the process that runs the cluster's coordinator; None if the coordinator does not run."""
    stored = read_status(name)
    is_running = stored is not None and time.time() - stored["at"] < _STATUS_SECONDS
    return stored["process"] if stored is not None and is_running and psutil.pid_exists(stored["process"]) else None


def keeper_process(name: str) -> int | None:
    """Return the number of the `smoe cluster up` process that keeps this cluster's workers running; None if there is no
    such process."""
    stored = read_keeper(name)
    if stored is None:
        return None
    try:
        began = psutil.Process(stored["process"]).create_time()
    except (psutil.Error, KeyError, TypeError, ValueError):
        return None
    return stored["process"] if abs(began - stored["began"]) < _SAME_SECONDS else None


def become_keeper(name: str) -> None:
    """Register this process as the supervisor of this cluster's workers, until the process ends. Raises `ClusterError`
    if another process is the supervisor."""
    other = keeper_process(name)
    if other not in (None, os.getpid()):
        raise ClusterError(
            f"workers of the cluster {name!r} are already running: process {other} (smoe cluster up) supervises "
            "them; use those workers, or end that process (Ctrl-C in its terminal) and repeat this command, or give "
            "another `name`",
            setting="name",
            given=name,
            allowed="a cluster without running workers on this machine",
        )
    keep_keeper(name, os.getpid(), psutil.Process().create_time())
