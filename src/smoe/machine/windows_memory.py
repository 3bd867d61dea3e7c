"""What Windows still promises: it gives no process memory that neither RAM nor the page file could hold, and a job (of
a container, a scheduler) may have limits of its own.
"""

from __future__ import annotations

import ctypes

import psutil

from smoe.memory import kernel32 as k32


def commit_bytes() -> int | None:
    """What this process may still ask for; None where the system does not say."""
    status = k32.MemoryStatus(length=ctypes.sizeof(k32.MemoryStatus))
    return int(status.commit_available) if k32.kernel32().calls.GlobalMemoryStatusEx(ctypes.byref(status)) else None


def job_bytes() -> int | None:
    """What the limits of the job that this process is in leave of it; None where there is no such limit."""
    limits = k32.JobLimits()
    if not _asked(k32.EXTENDED_LIMITS, limits):
        return None
    rooms: list[int] = []
    if limits.flags & k32.LIMITS_PROCESS:
        rooms.append(limits.process_memory - psutil.Process().memory_info().vms)  # there: what it was promised
    if limits.flags & k32.LIMITS_JOB:
        used = k32.JobMemory()
        rooms.append(limits.job_memory - (used.now if _asked(k32.MEMORY_USAGE, used) else limits.peak_job_memory))
    return max(0, min(rooms)) if rooms else None


def _asked(what: int, answer: ctypes.Structure) -> bool:
    calls = k32.kernel32().calls
    return bool(calls.QueryInformationJobObject(None, what, ctypes.byref(answer), ctypes.sizeof(answer), None))
