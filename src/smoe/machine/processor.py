"""The name of the processor, the cores that this process may use, and whether other programs use them."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

from smoe.config import EngineConfig
from smoe.machine.cgroup import cpu_quota
from smoe.machine.sysctl import sysctl_text


def processor_name() -> str:
    """Return the maker's name of the processor, if the system states it, else the kind of processor."""
    if sys.platform == "darwin":
        return sysctl_text("machdep.cpu.brand_string") or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the number of CPUs that this process may use: those in its CPU affinity, or fewer if a quota limits them.
    For a container with `--cpus 2.5` the number is two.

    All default numbers of threads and processes follow from this number.
    """
    cores, quota = _schedulable_cores(), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def set_compute_threads(asked: int | None) -> None:
    """Set the number of torch's threads to `asked`. With None, use torch's default, but at most `usable_cores`.

    With more threads than a quota allows, the system would stop all threads until the quota's next period.
    """
    import torch

    torch.set_num_threads(asked or min(torch.get_num_threads(), usable_cores()))


BUSY_SHARE = 0.2
"""The fraction of its time that a thread waits for a core, from which on other programs count as disturbing. Our own
reading threads cause less waiting."""


def waited_seconds() -> float | None:
    """Return the seconds that the calling thread, since its start, has been ready to run without a core. None if the
    system does not count them."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return None


def waited_share() -> float | None:
    """Return the fraction of its time that the calling thread has waited for a core. Only time in which the thread was
    running or ready to run counts. Return None if the system does not count this time."""
    with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        ran, waited = map(int, Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[:2])
        return waited / (ran + waited)
    return None


def is_pinned() -> bool:
    """Return whether the OpenMP runtime binds threads to cores. If it does, one thread may use fewer cores than the
    process."""
    return os.environ.get("OMP_PROC_BIND", "false").lower() not in ("false", "0")


def _schedulable_cores() -> int:
    """Return the number of cores in this process's affinity if the system states it, else the number of all cores."""
    if is_pinned() or not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def reading_threads(config: EngineConfig) -> int:
    """Return the number of threads that read experts: the configured number, or the default number but at most
    `usable_cores`."""
    asked, default = config.io_threads, EngineConfig.io_threads
    return min(asked, usable_cores()) if asked == default else asked
