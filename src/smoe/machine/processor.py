"""What the processor is called, how much of it is ours, and whether others use it at present."""

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
    """As its maker says it, where the system tells."""
    if sys.platform == "darwin":
        return sysctl_text("machdep.cpu.brand_string") or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """CPUs that this process may use: those that it may run on, or fewer where a quota pays for fewer (a container's
    `--cpus 2.5` for two). Every number of threads and processes that is not given is made from this one."""
    cores, quota = _schedulable_cores(), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def set_compute_threads(asked: int | None) -> None:
    """Have torch compute on the threads that are asked for; by default on its own number, but no more than
    `usable_cores`: threads beyond a quota stop together with the others until the next period."""
    import torch

    torch.set_num_threads(asked or min(torch.get_num_threads(), usable_cores()))


BUSY_SHARE = 0.2
"""Of a thread's time, waited for a core, from which other programs make it slow: our own readers, which want the same
cores, take less."""


def waited_seconds() -> float | None:
    """How long the calling thread has been ready to run without a core, since it began; None where the system does not
    count it."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return None


def waited_share() -> float | None:
    """The same, of the time in which the thread has wanted to run since it began."""
    with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        ran, waited = map(int, Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[:2])
        return waited / (ran + waited)
    return None


def is_pinned() -> bool:
    """Whether the OpenMP runtime pins threads to cores: then a thread has fewer than the process."""
    return os.environ.get("OMP_PROC_BIND", "false").lower() not in ("false", "0")


def _schedulable_cores() -> int:
    """Those that this process may run on, where the system shows them; else all."""
    if is_pinned() or not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def reading_threads(config: EngineConfig) -> int:
    """Threads that read experts: as many as the configuration has, of its default no more than `usable_cores`."""
    asked, default = config.io_threads, EngineConfig.io_threads
    return min(asked, usable_cores()) if asked == default else asked
