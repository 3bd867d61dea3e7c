"""Measures the memory of the whole process as the sum of three parts. The first is the Python interpreter and its
libraries. The second is the memory budget, in which the model runs. The third is memory that the libraries need in
addition while they compute.

The budget is exact, and the other two parts are measured. The interpreter and its libraries are the anonymous memory
before the first model is loaded, and all pages of program files. Libraries load more such pages when they compute. The
third part is the rest of the process's memory: compiled kernels and scratch memory. `smoe/__init__.py` limits it
(docs/log/memory.md).

Only Linux distinguishes pages of files from other memory. On other systems, all memory before the first model counts as
the first part. Code that is loaded later counts as the third part.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from smoe.machine.native_heap import give_back_heap

_STATUS = Path("/proc/self/status")
LIBRARIES, CODE, SCRATCH = "interpreter and libraries", "library code loaded later", "library scratch memory"
"""The names, for display, of the parts of the process's memory outside the budget."""
LIBRARIES_BYTES = 330 * 2**20
"""The bytes of interpreter and libraries after a command has imported them; 304 to 316 MiB were measured, with torch
2.13 (CPU) and transformers 5.23 on Linux, and more in a new environment."""
TOKENIZER_BYTES = 350
"""The bytes of a tokenizer for each token of the vocabulary: 50 MiB were measured for 152,000 tokens with as many
merges."""
LIBRARY_CODE_BYTES = 160 * 2**20
"""The most bytes of program pages that loading a model and computing add: 79 MiB with torch 2.13 (CPU). In a
new environment the system maps larger ranges: 110 MiB, and 34 MiB more for the imported libraries."""
OWN_KERNELS_CODE_BYTES = 32 * 2**20
"""The bound in place of `LIBRARY_CODE_BYTES` if smoe's own kernels compute all large products; 27 and 28 MiB were
measured."""
LIBRARY_SCRATCH_BYTES = 64 * 2**20
"""The most bytes of the library's cached kernels, scratch memory and free heap; 33 to 53 MiB were measured."""

_before: list[int] = []
"""The bytes of anonymous memory before the first model was loaded."""


class _Held(NamedTuple):
    """The RAM that a process occupies, in bytes."""

    own: int
    files: int
    """Pages of program files; 0 if the system does not distinguish them from other memory."""
    peak: int
    """The peak of both numbers together."""


class ProcessMemory(NamedTuple):
    """The RAM of a process at its peak, in bytes. `libraries`, `budget` and `scratch` add up to `whole`."""

    whole: int
    libraries: int
    """The bytes of interpreter, libraries and their code, and of everything that the program had allocated before the
    first model."""
    budget: int
    scratch: int
    """The bytes of the libraries' compiled kernels and scratch memory."""

    @property
    def outside_budget(self) -> int:
        return self.libraries + self.scratch

    def as_json(self) -> dict[str, int]:
        return {f"{name}_bytes": size for name, size in self._asdict().items()}


def note_start() -> None:
    """Record the memory of the process before a model is loaded. Only the first call has an effect."""
    if _before:
        return
    give_back_heap()
    held = _held()
    if held is not None:
        _before.append(held.own)


def libraries_bytes() -> int | None:
    """Return the RAM in bytes that a process takes without a model, for interpreter and libraries. It is measured in
    this process if torch has been imported; otherwise it is a constant. Return None if the system does not state the
    memory."""
    if "torch" not in sys.modules:
        return LIBRARIES_BYTES
    held = _held()
    return None if held is None else held.own + held.files


def process_memory(held_bytes: int) -> ProcessMemory | None:
    """Return this process's memory at its peak, divided into libraries, budget and scratch memory. `held_bytes`: the
    bytes of the budget. Return None if the system does not state the memory."""
    now = _held()
    if now is None or not _before:
        return None
    whole = now.peak
    libraries = min(whole, _before[0] + now.files)
    budget = min(held_bytes, whole - libraries)
    return ProcessMemory(whole, libraries, budget, whole - libraries - budget)


def outside_budget_bytes(reserved_bytes: int, by_own_kernels: bool = False, vocabulary: int = 0) -> dict[str, int]:
    """Return the largest memory that a process on a CPU needs outside the budget: the bytes, by a name for display.

    `reserved_bytes`: the bytes of the library's kernels that the budget includes. `by_own_kernels`: whether our kernels
    compute all large products. `vocabulary`: the number of tokens of the tokenizer. In a process that has loaded the
    libraries, the tokenizer counts as one of them if it was loaded before the model.
    """
    give_back_heap()
    lines = {} if (libraries := libraries_bytes()) is None else {LIBRARIES: libraries}
    lines["tokenizer"] = 0 if "torch" in sys.modules else vocabulary * TOKENIZER_BYTES
    lines[CODE] = OWN_KERNELS_CODE_BYTES if by_own_kernels else LIBRARY_CODE_BYTES
    lines[SCRATCH] = max(0, LIBRARY_SCRATCH_BYTES - reserved_bytes)
    return lines


def peak_bytes() -> int | None:
    """Return the peak of this process's RAM in bytes, with interpreter and libraries. None if the system does not state
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
    """Return the RAM that this process occupies, or None if the system does not state it."""
    if sys.platform not in ("darwin", "win32"):
        return _status()
    peak, now = peak_bytes(), int(psutil.Process().memory_info().rss)
    return None if peak is None else _Held(now, 0, max(now, peak))


def _status() -> _Held | None:
    """Return the RAM that this process occupies, from Linux's status file. None without that file."""
    try:
        lines = _STATUS.read_text(encoding="utf8").splitlines()
    except OSError:
        return None
    found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    if not {"RssAnon", "RssFile", "VmHWM"} <= found.keys():
        return None
    return _Held(*(int(found[name][0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM")))
