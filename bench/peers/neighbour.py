"""A neighbour: a process that keeps one core busy while an engine is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench.peers.conditions import set_priority

BUSY_LOOP = "while True: pass"


@contextmanager
def busy_neighbour(is_wanted: bool, nice: int) -> Iterator[None]:
    """Inside, one core has other work of the engine's priority. It is waited for at the end, so it counts as ours."""
    if not is_wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-S", "-c", BUSY_LOOP], start_new_session=True)
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        if nice:
            set_priority(process.pid, nice)
        yield
    finally:
        process.kill()
        process.wait()
