"""Which processes of this machine run for a cluster: its coordinator, and the supervisor of its workers."""

from __future__ import annotations

import os
import time

import psutil

from smoe.cluster.identity import keep_keeper, read_keeper, read_status
from smoe.errors import ClusterError

_STATUS_SECONDS = 3.0
"""Main says more often who is there."""
_SAME_SECONDS = 60.0
"""A process that began so near to the time that was noted is the one that noted it, not another that has its number
now. The system's own figure follows its clock, which may be set."""


def main_process(name: str) -> int | None:
    """The process of the running coordinator; None where none does."""
    stored = read_status(name)
    is_running = stored is not None and time.time() - stored["at"] < _STATUS_SECONDS
    return stored["process"] if stored is not None and is_running and psutil.pid_exists(stored["process"]) else None


def keeper_process(name: str) -> int | None:
    """The process of `smoe cluster up`, where it keeps workers of this cluster running."""
    stored = read_keeper(name)
    if stored is None:
        return None
    try:
        began = psutil.Process(stored["process"]).create_time()
    except (psutil.Error, KeyError, TypeError, ValueError):
        return None
    return stored["process"] if abs(began - stored["began"]) < _SAME_SECONDS else None


def become_keeper(name: str) -> None:
    """Register this process as the supervisor of this cluster's workers, until it ends. Raises `ClusterError` where
    another one does."""
    other = keeper_process(name)
    if other not in (None, os.getpid()):
        raise ClusterError(
            f"workers of the cluster {name!r} are already running: process {other} (smoe cluster up) supervises them; "
            "use them, or end that process (Ctrl-C there) and start again, or give another `name`",
            setting="name",
            given=name,
            allowed="a cluster without running workers on this machine",
        )
    keep_keeper(name, os.getpid(), psutil.Process().create_time())
