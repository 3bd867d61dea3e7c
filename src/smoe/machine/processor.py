"""What the processor is called."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path


def processor_name() -> str:
    """As its maker says it, where the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
