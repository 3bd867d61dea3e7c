"""Declares the functions of Windows' library kernel32 that smoe calls, and converts their errors to Python's.

Nothing here runs on other systems. The declared types have fixed sizes, so that tests can call a simulated library on
any system.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from functools import cache
from typing import Any

U32 = ctypes.c_uint32
"""Windows' type DWORD. Python's own type for it depends on the size of `long`."""
U64 = ctypes.c_uint64
_BOOL, _HANDLE, _SIZE, _TEXT = ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_wchar_p
NO_HANDLE = ctypes.c_void_p(-1).value
"""Windows' constant INVALID_HANDLE_VALUE."""

GENERIC_READ = 0x80000000
FILE_SHARE_READ, FILE_SHARE_DELETE = 1, 4
OPEN_EXISTING = 3
FILE_FLAG_NO_BUFFERING, FILE_FLAG_OVERLAPPED = 0x20000000, 0x40000000
FILE_STORAGE_INFO = 16
FSCTL_SET_SPARSE = 0x000900C4
EXTENDED_LIMITS, MEMORY_USAGE = 9, 28
"""The numbers of two information classes of a job: JobObjectExtendedLimitInformation and
JobObjectMemoryUsageInformation."""
LIMITS_PROCESS, LIMITS_JOB = 0x100, 0x200
"""The flags JOB_OBJECT_LIMIT_PROCESS_MEMORY and JOB_OBJECT_LIMIT_JOB_MEMORY of a job's limits."""
ERROR_HANDLE_EOF, ERROR_IO_PENDING = 38, 997

_ERRNO = {2: errno.ENOENT, 3: errno.ENOENT, 4: errno.EMFILE, 5: errno.EACCES, 8: errno.ENOMEM, 14: errno.ENOMEM}
_ERRNO |= {32: errno.EACCES, 33: errno.EACCES, 50: errno.EINVAL, 87: errno.EINVAL, 1455: errno.ENOMEM}
_ERRNO |= dict.fromkeys((1450, 1453, 1816), errno.EAGAIN)  # temporary lack of quota for locking a read's pages
"""Python's error numbers by those of Windows. All other errors become `EIO`."""


class Overlapped(ctypes.Structure):
    """The Windows structure OVERLAPPED, which describes one running request."""

    _fields_ = [
        ("internal", _SIZE),
        ("internal_high", _SIZE),
        ("offset", U32),
        ("offset_high", U32),
        ("event", _HANDLE),
    ]


class StorageInfo(ctypes.Structure):
    """The Windows structure FILE_STORAGE_INFO: sector sizes in bytes, flags and offsets."""

    _fields_ = [
        ("logical_sector", U32),
        ("physical_sector_atomic", U32),
        ("physical_sector", U32),
        ("effective_sector", U32),
        ("flags", U32),
        ("sector_offset", U32),
        ("partition_offset", U32),
    ]


class MemoryStatus(ctypes.Structure):
    """The Windows structure MEMORYSTATUSEX."""

    _fields_ = [
        ("length", U32),
        ("load", U32),
        ("total", U64),
        ("available", U64),
        ("commit_limit", U64),
        ("commit_available", U64),
        ("virtual_total", U64),
        ("virtual_available", U64),
        ("extended_available", U64),
    ]


class JobLimits(ctypes.Structure):
    """The Windows structure JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""

    _fields_ = [
        ("process_time", ctypes.c_int64),
        ("job_time", ctypes.c_int64),
        ("flags", U32),
        ("least_working_set", _SIZE),
        ("most_working_set", _SIZE),
        ("processes", U32),
        ("affinity", _SIZE),
        ("priority", U32),
        ("scheduling", U32),
        ("counters", U64 * 6),
        ("process_memory", _SIZE),
        ("job_memory", _SIZE),
        ("peak_process_memory", _SIZE),
        ("peak_job_memory", _SIZE),
    ]


class JobMemory(ctypes.Structure):
    """The Windows structure JOBOBJECT_MEMORY_USAGE_INFORMATION."""

    _fields_ = [("now", U64), ("peak", U64)]


_OVERLAPPED, _COUNT = ctypes.POINTER(Overlapped), ctypes.POINTER(U32)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "CreateFileW": (_HANDLE, (_TEXT, U32, U32, ctypes.c_void_p, U32, U32, _HANDLE)),
    "ReadFile": (_BOOL, (_HANDLE, ctypes.c_void_p, U32, _COUNT, _OVERLAPPED)),
    "GetOverlappedResult": (_BOOL, (_HANDLE, _OVERLAPPED, _COUNT, _BOOL)),
    "CancelIoEx": (_BOOL, (_HANDLE, _OVERLAPPED)),
    "CreateEventW": (_HANDLE, (ctypes.c_void_p, _BOOL, _BOOL, _TEXT)),
    "CloseHandle": (_BOOL, (_HANDLE,)),
    "GetFileInformationByHandleEx": (_BOOL, (_HANDLE, ctypes.c_int32, ctypes.c_void_p, U32)),
    "DeviceIoControl": (
        _BOOL,
        (_HANDLE, U32, ctypes.c_void_p, U32, ctypes.c_void_p, U32, _COUNT, ctypes.POINTER(Overlapped)),
    ),
    "GlobalMemoryStatusEx": (_BOOL, (ctypes.POINTER(MemoryStatus),)),
    "QueryInformationJobObject": (_BOOL, (_HANDLE, ctypes.c_int32, ctypes.c_void_p, U32, _COUNT)),
}
"""For each function: the type of its result, and the types of its arguments."""


class Kernel32:
    """The library kernel32: `calls` has its functions, and `error` turns a failure into an `OSError`."""

    def __init__(self, library: Any, last_error: Callable[[], int], words: Callable[[int], str]) -> None:
        """`last_error` returns the error number of the calling thread's last call. `words` returns the system's message
        for an error number."""
        for name, (result, arguments) in CALLS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.calls = library
        self.last_error = last_error
        self._words = words

    def error(self, code: int | None = None) -> OSError:
        """Return an `OSError` for the error number `code`, or for the calling thread's last call if `code` is None."""
        number = self.last_error() if code is None else code
        return OSError(_ERRNO.get(number, errno.EIO), f"{self._words(number).strip()} (Windows' error {number})")


@cache
def kernel32() -> Kernel32:
    """Return the library kernel32 of this Windows system."""
    windows: Any = ctypes  # ctypes has its names for Windows only on Windows
    return Kernel32(windows.WinDLL("kernel32", use_last_error=True), windows.get_last_error, windows.FormatError)
