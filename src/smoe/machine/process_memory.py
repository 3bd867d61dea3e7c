"""What the whole process holds, line by line: interpreter and libraries, the budget, and what the libraries keep.

The budget is ours and exact. The rest belongs to others and is measured: anonymous memory before the first model is
loaded, pages of program files (libraries bring more of them in when they compute), and what remains: compiled kernels
and scratch, which `smoe/__init__.py` bounds (docs/log/memory.md).

Linux tells files' pages from others. Elsewhere all that is there before the first model counts as interpreter and
libraries, and the code that these bring in later is among what remains.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from smoe.machine.native_heap import give_back_heap

_STATUS = Path("/proc/self/status")
LIBRARIES_BYTES = 440 * 2**20
"""Interpreter and libraries, imported and nothing done with them: torch 2.13 (CPU) and transformers 5.23 on Linux."""
LIBRARY_CODE_BYTES = 128 * 2**20
"""Pages of program files that loading and computing bring in besides those that importing does, at most: 79 MiB with
torch 2.13 (CPU), and 110 in a new environment, of whose files the system maps larger pieces."""
OWN_KERNELS_CODE_BYTES = 40 * 2**20
"""The same where our kernels compute all that is large: 27 MiB."""
LIBRARY_SCRATCH_BYTES = 64 * 2**20
"""Kernels that the library keeps, its scratch, and what the allocator holds free, at most: 33 to 53 MiB."""

_before: list[int] = []
"""Anonymous bytes before the first model was loaded."""


class _Held(NamedTuple):
    """Bytes of RAM."""

    own: int
    files: int
    """Pages of program files; 0 where the system does not tell them from others, which are then among its own."""
    peak: int
    """The most of both so far."""


class ProcessMemory(NamedTuple):
    """Bytes at the process's peak; the three parts add up to the whole."""

    whole: int
    libraries: int
    """Interpreter, libraries and their code, and what the program held before the first model."""
    budget: int
    scratch: int
    """Kernels and scratch of the libraries."""

    def as_json(self) -> dict[str, int]:
        return {f"{name}_bytes": size for name, size in self._asdict().items()}


def note_start() -> None:
    """Before a model is loaded; only the first time counts."""
    held = _held()
    if not _before and held is not None:
        _before.append(held.own)


def libraries_bytes() -> int | None:
    """What a process holds before a model, interpreter and libraries: this process, where they are imported here. None
    where the system does not say."""
    if "torch" not in sys.modules:
        return LIBRARIES_BYTES
    held = _held()
    return None if held is None else held.own + held.files


def process_memory(held_bytes: int) -> ProcessMemory | None:
    """The process at its peak, of which the budget holds `held_bytes`; None where the system does not say."""
    now = _held()
    if now is None or not _before:
        return None
    whole = now.peak
    libraries = min(whole, _before[0] + now.files)
    budget = min(held_bytes, whole - libraries)
    return ProcessMemory(whole, libraries, budget, whole - libraries - budget)


def outside_budget_bytes(reserved_bytes: int, by_own_kernels: bool = False) -> dict[str, int]:
    """What a process on a CPU takes outside the budget, at most, by name, for a plan made in this process.

    `reserved_bytes`: of the library's kernels, the budget holds so much already; `by_own_kernels`: they compute all
    that is large.
    """
    give_back_heap()
    lines = {} if (libraries := libraries_bytes()) is None else {"interpreter and libraries": libraries}
    lines["their code, once they compute"] = OWN_KERNELS_CODE_BYTES if by_own_kernels else LIBRARY_CODE_BYTES
    lines["their kernels and scratch"] = max(0, LIBRARY_SCRATCH_BYTES - reserved_bytes)
    return lines


def peak_bytes() -> int | None:
    """The most RAM this process, interpreter and libraries included, has held; None where the system does not say."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _held() -> _Held | None:
    """None where the system does not say."""
    if sys.platform not in ("darwin", "win32"):
        return _status()
    peak, now = peak_bytes(), int(psutil.Process().memory_info().rss)
    return None if peak is None else _Held(now, 0, max(now, peak))


def _status() -> _Held | None:
    """By Linux's file; None where there is no such file."""
    try:
        lines = _STATUS.read_text(encoding="utf8").splitlines()
    except OSError:
        return None
    found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    if not {"RssAnon", "RssFile", "VmHWM"} <= found.keys():
        return None
    return _Held(*(int(found[name][0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM")))
