"""A cache of compiled kernels in the user's cache folder, so that later processes need not compile them.

The key of an entry names everything on which the machine code depends. Because the content is executed, entries that
another user may have written are never used (`private_cache.py`). Only on Linux (`machine_code.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from smoe import __version__, formats, kernels
from smoe.private_cache import PrivateCache

CODE = PrivateCache("kernels", "compiled kernels", "code", b"smoe code 1\n", 16 << 20)
"""The entries. The kernels of one format take some 30 KB."""
_CPUINFO = Path("/proc/cpuinfo")
_OF_A_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features",
                   "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision")  # fmt: skip
"""The lines of /proc/cpuinfo that describe the processor and do not change while the system runs."""


def key_of(*parts: str) -> bytes:
    """Return the cache key of a compiled kernel. The key contains `parts`, a description of this processor, and a
    digest of the code that generates kernels."""
    return "\0".join([__version__, source_digest(), _processor(), *parts]).encode()


@functools.cache
def source_digest() -> str:
    """Return a digest of the source code of all modules that generate kernels, and of the formats."""
    return digest_of(kernels, formats)


def digest_of(*packages: ModuleType) -> str:
    """Return a digest of the source code of all modules of these packages."""
    found = hashlib.sha256()
    for package in packages:
        for path in sorted(Path(next(iter(package.__path__))).glob("*.py")):
            found.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def processor_lines(names: Iterable[str]) -> list[str]:
    """Return the lines of /proc/cpuinfo with these names, of the first processor. The list is empty without
    /proc/cpuinfo."""
    wanted, lines = set(names), []
    with contextlib.suppress(OSError), _CPUINFO.open(encoding="utf8", errors="replace") as file:
        for line in file:
            if not line.strip():
                break  # the following processors equal the first
            if line.partition(":")[0].strip() in wanted:
                lines.append(" ".join(line.split()))
    return lines


@functools.cache
def _processor() -> str:
    """Return a description of the CPU: two CPUs with different machine code have different descriptions. Without
    /proc/cpuinfo it is the system's name of the machine type."""
    return "\n".join([platform.machine(), *processor_lines(_OF_A_PROCESSOR)])
