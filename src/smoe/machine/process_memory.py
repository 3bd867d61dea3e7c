"""Measure the memory of the whole process by part: interpreter and libraries, the budget, and what libraries keep.

The budget is exact. The rest is measured: anonymous memory before the first model is loaded, pages of program files
(libraries load more when they compute), and the remainder, compiled kernels and scratch, which `smoe/__init__.py`
limits (docs/log/memory.md). Only Linux distinguishes pages of files. On other systems everything before the first model
counts as interpreter and libraries, and code loaded later as part of the remainder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from smoe.machine.native_heap import give_back_heap

_STATUS = Path("/proc/self/status")
LIBRARIES_BYTES = 440 * 2**20
"""The size in bytes of interpreter and libraries after importing: torch 2.13 (CPU) and transformers 5.23 on Linux."""
LIBRARY_CODE_BYTES = 128 * 2**20
"""The largest size of program pages that loading and computing add: 79 MiB with torch 2.13 (CPU), 110 in a new
environment, where the system maps larger pieces."""
OWN_KERNELS_CODE_BYTES = 40 * 2**20
"""As `LIBRARY_CODE_BYTES`, if our kernels do all large computations: 27 MiB were measured."""
LIBRARY_SCRATCH_BYTES = 64 * 2**20
"""The largest size of the library's cached kernels, scratch and free heap: 33 to 53 MiB."""

_before: list[int] = []
"""The number of anonymous bytes before the first model was loaded."""


class _Held(NamedTuple):
    """The RAM of a process, in bytes."""

    own: int
    files: int
    """Pages of program files; 0 if the system does not distinguish them from the process's own."""
    peak: int
    """The peak of both together."""


class ProcessMemory(NamedTuple):
    """Bytes at the process's peak; the three parts add up to the whole."""

    whole: int
    libraries: int
    """The bytes of interpreter, libraries and their code, and of what the program held before the first model."""
    budget: int
    scratch: int
    """The bytes of the libraries' kernels and scratch."""

    def as_json(self) -> dict[str, int]:
        return {f"{name}_bytes": size for name, size in self._asdict().items()}


def note_start() -> None:
    """Record the memory before a model is loaded; only the first call counts."""
    held = _held()
    if not _before and held is not None:
        _before.append(held.own)


def libraries_bytes() -> int | None:
    """Return the bytes of a process without a model: those of this process if torch is imported, else a constant. None
    if the system does not state them."""
    if "torch" not in sys.modules:
        return LIBRARIES_BYTES
    held = _held()
    return None if held is None else held.own + held.files


def process_memory(held_bytes: int) -> ProcessMemory | None:
    """Return the process's memory at its peak, `held_bytes` of it in the budget; None if the system does not state
    it."""
    now = _held()
    if now is None or not _before:
        return None
    whole = now.peak
    libraries = min(whole, _before[0] + now.files)
    budget = min(held_bytes, whole - libraries)
    return ProcessMemory(whole, libraries, budget, whole - libraries - budget)


def outside_budget_bytes(reserved_bytes: int, by_own_kernels: bool = False) -> dict[str, int]:
    """Return the largest memory that a process on a CPU needs outside the budget, by name, for a plan made in this
    process.

    `reserved_bytes`: the part of the library's kernels that the budget includes; `by_own_kernels`: our kernels compute
    everything large.
    """
    give_back_heap()
    lines = {} if (libraries := libraries_bytes()) is None else {"interpreter and libraries": libraries}
    lines["their code, once they compute"] = OWN_KERNELS_CODE_BYTES if by_own_kernels else LIBRARY_CODE_BYTES
    lines["their kernels and scratch"] = max(0, LIBRARY_SCRATCH_BYTES - reserved_bytes)
    return lines


def peak_bytes() -> int | None:
    """Return the peak RAM of this process, interpreter and libraries included, or None if the system does not state
    it."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _held() -> _Held | None:
    """Return the process's memory, or None if the system does not state it."""
    if sys.platform not in ("darwin", "win32"):
        return _status()
    peak, now = peak_bytes(), int(psutil.Process().memory_info().rss)
    return None if peak is None else _Held(now, 0, max(now, peak))


def _status() -> _Held | None:
    """Return the process's memory by Linux's status file, or None without that file."""
    try:
        lines = _STATUS.read_text(encoding="utf8").splitlines()
    except OSError:
        return None
    found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    if not {"RssAnon", "RssFile", "VmHWM"} <= found.keys():
        return None
    return _Held(*(int(found[name][0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM")))
