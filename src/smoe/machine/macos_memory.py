"""How much memory macOS has for us.

What counts as available elsewhere has pages of programs that are idle at present: to have them they must be compressed
or swapped. Free are pages that hold nothing, files, or what its owner has given up.
"""

from __future__ import annotations

from smoe.machine.sysctl import sysctl_int

_FREE = ("vm.page_free_count", "vm.page_pageable_external_count", "vm.page_purgeable_count")
_PRESSURE = {2: "warning", 4: "critical"}


def free_bytes() -> int | None:
    """What can be had without compressing or swapping anybody; None where the system does not say."""
    page, counts = sysctl_int("vm.pagesize"), [sysctl_int(name) for name in _FREE]
    known = [count for count in counts if count is not None]
    return page * sum(known) if page and len(known) == len(counts) else None


def pressure() -> str | None:
    """The system's own word for it, where memory is short."""
    return _PRESSURE.get(sysctl_int("kern.memorystatus_vm_pressure_level") or 0)
