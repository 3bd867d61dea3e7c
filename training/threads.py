"""How many threads to use when the cores are shared with more important work.

Threads of one matrix product wait for each other. When another process takes one of two cores from a run of low
priority, two threads are then far slower than one (measured: 160 against about 900 tokens a second), so the run gives
up a thread while others work.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")


@dataclass(frozen=True)
class CpuTimes:
    """Clock ticks of all cores together since the machine started."""

    foreign: float
    """Ticks in which a core worked for another process than this one."""
    total: float
    """All ticks, idle ones included."""


def read_cpu_times(path: Path = STAT) -> CpuTimes | None:
    """The counters now, or None on systems without them."""
    if not path.exists():
        return None
    user, nice, system, *rest = (int(field) for field in path.read_text().split("\n", 1)[0].split()[1:9])
    own = time.process_time() * os.sysconf("SC_CLK_TCK")
    return CpuTimes(foreign=user + nice + system - own, total=user + nice + system + sum(rest))


def spare_threads(before: CpuTimes | None, now: CpuTimes | None, cores: int) -> int:
    """Threads for a low-priority process after what the others used between two readings, 1 to `cores`."""
    if before is None or now is None or now.total == before.total:
        return cores
    foreign_cores = cores * (now.foreign - before.foreign) / (now.total - before.total)
    return max(1, min(cores, cores - round(foreign_cores + 0.2)))


def core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
