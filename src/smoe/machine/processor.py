"""What the processor is called, and how much of it is ours."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

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
    """Those that this process may run on, where the system tells; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
