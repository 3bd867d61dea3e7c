"""Reads experts from files on Windows. It was written from Windows' documentation and tested with a simulated kernel32.

* Opening: unbuffered, which bypasses the system's cache, and overlapped, because otherwise one handle serves only one
  read at a time for all threads. Other programs may read, rename and delete the file. They cannot write to it while it
  is open, because Windows would show the time of a write only after the writer has closed the file.
* Reading: each read has an offset of its own, passed in OVERLAPPED, and waits for an event of its own.
* End of the file: a read that begins there fails with ERROR_HANDLE_EOF; one that crosses it returns fewer bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

from smoe.memory import kernel32 as k32
from smoe.memory.store import PAGE


class WindowsFile:
    """A file that is read by its Windows handle. A descriptor of the C library owns the handle."""

    def __init__(self, path: Path, direct: bool) -> None:
        self._system = k32.kernel32()
        flags = k32.FILE_FLAG_OVERLAPPED | (k32.FILE_FLAG_NO_BUFFERING if direct else 0)
        shared = k32.FILE_SHARE_READ | k32.FILE_SHARE_DELETE
        handle = self._system.calls.CreateFileW(
            str(path), k32.GENERIC_READ, shared, None, k32.OPEN_EXISTING, flags, None
        )
        if handle in (None, k32.NO_HANDLE):
            raise self._system.error()
        self._handle: int = handle
        self.descriptor = _descriptor_of(handle)
        self.is_direct = direct
        if direct and not self._takes_pages():
            self.close()
            raise OSError(errno.EINVAL, "its sectors are larger than our pages")

    def read_into(self, buffer: memoryview, offset: int) -> int:
        calls, came = self._system.calls, k32.U32()
        event = calls.CreateEventW(None, True, False, None)
        if not event:
            raise self._system.error()
        begin = ctypes.c_char.from_buffer(buffer)
        request = k32.Overlapped(offset=offset & 0xFFFFFFFF, offset_high=offset >> 32, event=event)
        is_over = False
        try:
            if not calls.ReadFile(self._handle, ctypes.addressof(begin), len(buffer), None, ctypes.byref(request)):
                code = self._system.last_error()
                if code != k32.ERROR_IO_PENDING:
                    is_over = True
                    return self._nothing(code)
            is_done = calls.GetOverlappedResult(self._handle, ctypes.byref(request), ctypes.byref(came), True)
            code, is_over = self._system.last_error(), True
            return came.value if is_done else self._nothing(code)
        finally:
            if not is_over:  # after an interrupt the system must not write to memory that is reused
                calls.CancelIoEx(self._handle, ctypes.byref(request))
                calls.GetOverlappedResult(self._handle, ctypes.byref(request), ctypes.byref(came), True)
            calls.CloseHandle(event)

    def forget(self, offset: int, nbytes: int) -> None:
        """Do nothing, because Windows has no call to drop pages from its cache."""

    def close(self) -> None:
        os.close(self.descriptor)

    def _nothing(self, code: int) -> int:
        """Return 0, the number of bytes, for a read that failed because it began at the end of the file. Raise
        `OSError` for other failures."""
        if code == k32.ERROR_HANDLE_EOF:
            return 0
        raise self._system.error(code)

    def _takes_pages(self) -> bool:
        """Return whether our pages are multiples of the disk's sectors. Also True if the file system does not state its
        sector size, as file systems of other machines do not."""
        found = k32.StorageInfo()
        size = ctypes.sizeof(found)
        asked = self._system.calls.GetFileInformationByHandleEx
        is_known = asked(self._handle, k32.FILE_STORAGE_INFO, ctypes.byref(found), size)
        return not is_known or not found.logical_sector or PAGE % found.logical_sector == 0


def _descriptor_of(handle: int) -> int:
    """Return a C library descriptor for a Windows handle. Closing the descriptor closes the handle."""
    import msvcrt

    library: Any = msvcrt  # msvcrt exists only on Windows, for type checkers too
    descriptor: int = library.open_osfhandle(handle, os.O_RDONLY)
    return descriptor
