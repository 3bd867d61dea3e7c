"""Reads how much memory Windows still grants. RAM and page file together must hold all granted memory, and a job may
have limits."""

from __future__ import annotations

import ctypes

import psutil

from smoe.memory import kernel32 as k32


def commit_bytes() -> int | None:
    """Return the bytes that this process may still allocate. None if the system does not state them."""
    status = k32.MemoryStatus(length=ctypes.sizeof(k32.MemoryStatus))
    return int(status.commit_available) if k32.kernel32().calls.GlobalMemoryStatusEx(ctypes.byref(status)) else None


def job_bytes() -> int | None:
    """Return the bytes that this process may still allocate under the limits of its Windows job. Return None without
    such a limit."""
    limits = k32.JobLimits()
    if not _asked(k32.EXTENDED_LIMITS, limits):
        return None
    rooms: list[int] = []
    if limits.flags & k32.LIMITS_PROCESS:
        # the process limit counts committed memory
        rooms.append(limits.process_memory - psutil.Process().memory_info().vms)
    if limits.flags & k32.LIMITS_JOB:
        used = k32.JobMemory()
        rooms.append(limits.job_memory - (used.now if _asked(k32.MEMORY_USAGE, used) else limits.peak_job_memory))
    return max(0, min(rooms)) if rooms else None


def _asked(what: int, answer: ctypes.Structure) -> bool:
    calls = k32.kernel32().calls
    return bool(calls.QueryInformationJobObject(None, what, ctypes.byref(answer), ctypes.sizeof(answer), None))
