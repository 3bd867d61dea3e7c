"""Finds out which bytes of a file are in the operating system's page cache, by cachestat(2) or mincore(2).

After a download or an earlier run much of a model may be there. Copying these bytes is faster than reading them from
disk again. For a megabyte, cachestat takes 3 us and mincore 22, a third of the time of the copy; cachestat needs Linux
6.5. Both take time from each read, so they are called for few reads once many in a row found nothing. These few calls
never end: the system evicts first what was read first, so of a file that nearly fills the memory the first layers are
missing and all later ones are there.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_SAMPLES = 256
"""The least number of pages, evenly spaced over the file, from which the cached fraction is computed."""
_MISSES = 64
"""After this many uncached ranges in a row, only every `_STRIDE`th range is examined, until one is cached."""
_STRIDE = 16
_CACHESTAT = 451
"""The number of the system call, the same on all processors for which Python wheels exist."""
_FAILED = ctypes.c_void_p(-1).value
"""What mmap(2) returns after an error."""


class CachedFile:
    """The cached bytes of an open file. Several threads may call its methods.

    The class is for files that are too large to be in the page cache and in the slots at once, so `read_into` can drop
    a range from the cache when it has been copied.
    """

    def __init__(self, descriptor: int, has_cachestat: bool) -> None:
        """`descriptor`: a file that is open for buffered reads; it is closed by `close`. `has_cachestat`: examine the
        file by cachestat; otherwise by mincore. Raises `OSError` if the file cannot be mapped for mincore."""
        self._descriptor = descriptor
        self._nbytes = os.fstat(descriptor).st_size
        self._begin = None if has_cachestat else _mapped(descriptor, self._nbytes)
        """The address at which the file is mapped for mincore; None: cachestat is used."""
        self._misses = 0
        """The number of uncached ranges since the last cached one, those that were not examined among them."""

    def read_into(self, buffer: memoryview, offset: int, drops: bool) -> int:
        """Read from `offset` into the buffer, if the whole range is known to be cached. Return the number of bytes, 0
        otherwise. `offset` is a multiple of the page size. `drops`: drop the range from the cache afterwards."""
        is_examined = self._misses < _MISSES or self._misses % _STRIDE == 0
        if not is_examined or not self._has(offset, len(buffer)):
            self._misses += 1
            return 0
        self._misses = 0
        came = os.preadv(self._descriptor, [buffer], offset)
        if drops:
            os.posix_fadvise(self._descriptor, offset, came, os.POSIX_FADV_DONTNEED)
        return came

    def cached_share(self) -> float:
        """Return the fraction of the file that is cached, from 0 to 1. It is that of some evenly spaced pages."""
        pages = -(-self._nbytes // mmap.PAGESIZE)
        sample = range(0, pages, max(1, pages // _SAMPLES))
        return sum(self._has(page * mmap.PAGESIZE, 1) for page in sample) / len(sample)

    def close(self) -> None:
        self.unmap()
        os.close(self._descriptor)

    def unmap(self) -> None:
        """End the examination of the file. The descriptor stays open."""
        if self._begin is not None:
            _libc().munmap(self._begin, self._nbytes)
            self._begin = None

    def _has(self, offset: int, nbytes: int) -> bool:
        nbytes = min(nbytes, self._nbytes - offset)
        if nbytes <= 0:
            return False
        nbytes += offset % mmap.PAGESIZE
        offset -= offset % mmap.PAGESIZE
        pages = -(-nbytes // mmap.PAGESIZE)
        if self._begin is None:
            return _cached_pages(self._descriptor, offset, nbytes) == pages
        states = (ctypes.c_ubyte * pages)()
        if _libc().mincore(self._begin + offset, nbytes, states):
            return False
        return min(bytes(states)) & 1 == 1


def cached_file(path: str | os.PathLike[str], opened: int) -> CachedFile | None:
    """Open a file of which parts are in the page cache. `opened`: a descriptor of the same file.

    Return None if no part is, if the system does not say, if it refuses another descriptor or mapping, or if the path
    names another file by now. All these only make reads slower.
    """
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.path.sameopenfile(descriptor, opened) and _may_examine(descriptor, path):
                found = _examined(descriptor)
                if found is not None:
                    descriptor = -1
                return found
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    return None


def _examined(descriptor: int) -> CachedFile | None:
    """Return an open file with the system call that finds a part of it in the page cache, or None. Of files in an
    overlay, which are those of container images, cachestat counts no page. Raises `OSError`."""
    has_cachestat = _cached_pages(descriptor, 0, 1) is not None
    for by_cachestat in (True, False) if has_cachestat else (False,):
        found = CachedFile(descriptor, by_cachestat)
        if found.cached_share() > 0:
            return found
        found.unmap()
    return None


def _may_examine(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Return whether the system states which pages of a file are cached. For files of other users cachestat fails, and
    mincore returns that every page is."""
    state = os.fstat(descriptor)
    return state.st_size > 0 and (state.st_uid == os.geteuid() or os.access(path, os.W_OK))


def _cached_pages(descriptor: int, offset: int, nbytes: int) -> int | None:
    """Return how many pages of a range, which begins with a page, are in the page cache. Return None if the system does
    not state it."""
    states = (ctypes.c_uint64 * 7)(offset, nbytes)  # the range, and five counters of the answer
    at = ctypes.addressof(states)
    return None if _syscall()(_CACHESTAT, descriptor, at, at + 16, 0) else states[2]


@functools.cache
def _syscall() -> Callable[..., int]:
    """Return the C library's function for system calls. It does not release the interpreter's lock: getting the lock
    back takes longer than cachestat."""
    call = ctypes.PyDLL(None).syscall
    call.restype, call.argtypes = ctypes.c_long, (ctypes.c_long, ctypes.c_uint, *[ctypes.c_void_p] * 2, ctypes.c_uint)
    return call


def _mapped(descriptor: int, nbytes: int) -> int:
    """Map a file into the address space, without reading it, and return the address. (Python's `mmap` objects do not
    state their address.) Raises `OSError`."""
    address: int | None = _libc().mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address


@functools.cache
def _libc() -> ctypes.CDLL:
    """Return the C library, with the types of the functions that are used here."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc
