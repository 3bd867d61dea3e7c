"""Reads the free memory of macOS.

psutil's available memory includes idle pages of other programs, which would have to be compressed or swapped. Here only
pages count as free that are empty, belong to files, or are marked as purgeable.
"""

from __future__ import annotations

from smoe.machine.sysctl import sysctl_int

_FREE = ("vm.page_free_count", "vm.page_pageable_external_count", "vm.page_purgeable_count")
_PRESSURE = {2: "warning", 4: "critical"}


def free_bytes() -> int | None:
    """Return the bytes that are free without compressing or swapping memory. None if the system does not state them."""
    page, counts = sysctl_int("vm.pagesize"), [sysctl_int(name) for name in _FREE]
    known = [count for count in counts if count is not None]
    return page * sum(known) if page and len(known) == len(counts) else None


def pressure() -> str | None:
    """Return the system's name for its memory pressure, or None if memory is not short."""
    return _PRESSURE.get(sysctl_int("kern.memorystatus_vm_pressure_level") or 0)
