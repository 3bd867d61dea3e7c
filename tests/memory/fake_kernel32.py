"""Windows' kernel32 as far as smoe calls it, kept to its documentation, on files of this system.

Every call passes through ctypes with the types that were declared for it. What Windows refuses is refused: unbuffered
reads that are not whole sectors, overlapped ones without an event. A read's bytes come when its result is asked for, so
whoever does not wait has none. `msvcrt` and the parts of ctypes that only Windows has are here, too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from smoe.memory import kernel32 as declared

ACCESS_DENIED, FILE_NOT_FOUND, INVALID_PARAMETER, ABORTED = 5, 2, 87, 995
LK_NBLCK = 2


class Call:
    """A function of the library: called in C, with the types that it was given."""

    def __init__(self, does: Callable[..., Any]) -> None:
        self.does = does
        self.restype: Any = None
        self.argtypes: Any = None
        self._in_c: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._in_c is None:
            self._in_c = ctypes.CFUNCTYPE(self.restype, *self.argtypes)(self.does)
        return self._in_c(*arguments)


class Opened(NamedTuple):
    descriptor: int
    is_unbuffered: bool
    share: int


class FakeKernel32:
    """The library, and what it has seen."""

    def __init__(self, sector: int = 4096, is_pending: bool = True) -> None:
        """`is_pending`: reads take a while, as from a disk; else they are done at once, as from the cache."""
        self.sector, self.is_pending = sector, is_pending
        self.refuses_unbuffered = False
        self.fails_with: list[int] = []
        """Errors of the next reads."""
        self.status = {"total": 16 << 30, "available": 8 << 30, "commit_limit": 20 << 30, "commit_available": 12 << 30}
        self.job: dict[str, int] | None = None
        """The fields of the job's limits, and `now`, what it uses; None: the process is in no job."""
        self.files: dict[int, Opened] = {}
        self.events: set[int] = set()
        self.under_way: dict[int, tuple[int, int, int, int]] = {}
        self.cancelled = 0
        self.sparse: set[int] = set()
        """Descriptors of files that were declared to have holes."""
        self._numbers = itertools.count(0x1000, 4)
        self._error = threading.local()
        for name in declared.CALLS:
            setattr(self, name, Call(getattr(self, f"_{name}")))

    def last_error(self) -> int:
        return int(getattr(self._error, "code", 0))

    def _fail(self, code: int) -> int:
        self._error.code = code
        return 0

    def _CreateFileW(self, path: str, access: int, share: int, _: Any, how: int, flags: int, __: Any) -> int:
        assert access == declared.GENERIC_READ and how == declared.OPEN_EXISTING
        assert flags & declared.FILE_FLAG_OVERLAPPED
        is_unbuffered = bool(flags & declared.FILE_FLAG_NO_BUFFERING)
        nothing = declared.NO_HANDLE
        assert nothing is not None
        if is_unbuffered and self.refuses_unbuffered:
            self._fail(INVALID_PARAMETER)
            return nothing
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            self._fail(FILE_NOT_FOUND)
            return nothing
        handle = next(self._numbers)
        self.files[handle] = Opened(descriptor, is_unbuffered, share)
        return handle

    def _ReadFile(self, handle: int, address: int, nbytes: int, count: Any, request: Any) -> int:
        file, wanted = self.files[handle], request.contents
        assert not count and wanted.event in self.events, "of an overlapped read, the count comes with its result"
        offset = wanted.offset | wanted.offset_high << 32
        if self.fails_with:
            return self._fail(self.fails_with.pop(0))
        if file.is_unbuffered and (offset % self.sector or nbytes % self.sector or address % self.sector):
            return self._fail(INVALID_PARAMETER)
        if offset >= os.fstat(file.descriptor).st_size and not self.is_pending:
            return self._fail(declared.ERROR_HANDLE_EOF)
        self.under_way[ctypes.addressof(wanted)] = (file.descriptor, address, nbytes, offset)
        return self._fail(declared.ERROR_IO_PENDING) if self.is_pending else 1

    def _GetOverlappedResult(self, _: int, request: Any, count: Any, waits: int) -> int:
        assert waits
        read = self.under_way.pop(ctypes.addressof(request.contents), None)
        if read is None:
            return self._fail(ABORTED)
        descriptor, address, nbytes, offset = read
        data = os.pread(descriptor, nbytes, offset)
        if not data:
            return self._fail(declared.ERROR_HANDLE_EOF)
        ctypes.memmove(address, data, len(data))
        count.contents.value = len(data)
        return 1

    def _CancelIoEx(self, _: int, request: Any) -> int:
        self.cancelled += 1
        return int(self.under_way.pop(ctypes.addressof(request.contents), None) is not None)

    def _CreateEventW(self, _: Any, is_manual: int, is_set: int, name: str | None) -> int:
        assert is_manual and not is_set and name is None
        event = next(self._numbers)
        self.events.add(event)
        return event

    def _CloseHandle(self, handle: int) -> int:
        self.events.remove(handle)
        return 1

    def _GetFileInformationByHandleEx(self, handle: int, what: int, address: int, nbytes: int) -> int:
        assert handle in self.files and what == declared.FILE_STORAGE_INFO
        found = declared.StorageInfo.from_address(address)
        assert nbytes == ctypes.sizeof(found)
        found.logical_sector = self.sector
        return 1

    def _DeviceIoControl(self, handle: int, code: int, *_: Any) -> int:
        assert code == declared.FSCTL_SET_SPARSE
        self.sparse.add(handle)
        return 1

    def _GlobalMemoryStatusEx(self, status: Any) -> int:
        if status.contents.length != ctypes.sizeof(declared.MemoryStatus):
            return self._fail(INVALID_PARAMETER)
        for name, value in self.status.items():
            setattr(status.contents, name, value)
        return 1

    def _QueryInformationJobObject(self, job: int | None, what: int, address: int, nbytes: int, _: Any) -> int:
        assert job is None, "the job that the process is in"
        if self.job is None:
            return self._fail(ACCESS_DENIED)
        kind = {declared.EXTENDED_LIMITS: declared.JobLimits, declared.MEMORY_USAGE: declared.JobMemory}[what]
        assert nbytes == ctypes.sizeof(kind)
        found = kind.from_address(address)
        for name in {name for name, *_ in kind._fields_} & self.job.keys():
            setattr(found, name, self.job[name])
        return 1


@contextmanager
def on_windows(library: FakeKernel32) -> Iterator[None]:
    """Inside, whoever asks for kernel32 gets this one. `sys.platform` stays what it is."""

    def open_osfhandle(handle: int, flags: int) -> int:
        return library.files[handle].descriptor

    def get_osfhandle(descriptor: int) -> int:
        return descriptor

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        assert mode == LK_NBLCK and nbytes == 1
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    names = {"open_osfhandle": open_osfhandle, "get_osfhandle": get_osfhandle}
    names |= {"locking": locking, "LK_NBLCK": LK_NBLCK}

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "msvcrt", SimpleNamespace(**names))  # type: ignore[arg-type]
        patch.setattr(ctypes, "WinDLL", lambda name, use_last_error: library, raising=False)
        patch.setattr(ctypes, "get_last_error", library.last_error, raising=False)
        patch.setattr(ctypes, "FormatError", lambda code: f"what Windows says of {code}.\r\n", raising=False)
        declared.kernel32.cache_clear()
        try:
            yield
        finally:
            declared.kernel32.cache_clear()


def leaked(library: FakeKernel32) -> list[int]:
    """Descriptors that are open still."""
    return [each.descriptor for each in library.files.values() if Path(f"/proc/self/fd/{each.descriptor}").exists()]
