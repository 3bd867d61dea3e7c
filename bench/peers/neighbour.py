"""A neighbour: a process that takes processor time while an engine is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from bench.peers.conditions import set_priority

Neighbour = Literal["no", "yes", "bursts"]
"""No other process; one that keeps one core busy all the time; one that works in bursts, on any core."""
NEIGHBOURS: tuple[Neighbour, ...] = get_args(Neighbour)
BUSY_LOOP = "while True: pass"
BURSTS = """
import random, time
draw = random.Random(0)
while True:
    end = time.perf_counter() + draw.uniform(0.005, 0.1)
    while time.perf_counter() < end: pass
    time.sleep(draw.uniform(0.005, 0.1))
"""
"""Works for 5 to 100 ms, pauses for 5 to 100 ms, and so on, as a browser or a compiler may: half of one core."""


@contextmanager
def other_work(kind: Neighbour, nice: int) -> Iterator[None]:
    """Run a neighbour of this kind inside the context, with the engine's priority. The steady one runs on one core, the
    one that works in bursts wherever the system puts it. It is waited for at the end, so its time counts as ours."""
    if kind == "no":
        yield
        return
    program = BUSY_LOOP if kind == "yes" else BURSTS
    process = subprocess.Popen([sys.executable, "-S", "-c", program], start_new_session=True)
    try:
        if kind == "yes" and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        if nice:
            set_priority(process.pid, nice)
        yield
    finally:
        process.kill()
        process.wait()
