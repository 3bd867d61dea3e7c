"""Expert slots on the device that computes: one arena, allocated and touched once, reused for ever.

On a CPU the arena is anonymous, page-aligned memory: reads land in it directly. Memory that was never used before is
slower to touch than the disk is to read, so it is touched when it is made. On a GPU it is one block of device memory.
On a CPU it needs no torch before the first tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from smoe.memory.store import PAGE

if TYPE_CHECKING:
    import torch

_POPULATE_WRITE = 23 if sys.platform == "linux" else None
"""madvise(2): back pages as if written to, without changing them; Python has no name for it."""
_POPULATE_BYTES = 64 * 2**20
DONT_NEED: int = getattr(mmap, "MADV_DONTNEED", 0)
GIVES_BACK = sys.platform == "linux"
"""Whether parts of such memory can be given back at once and used again; other systems keep it until they lack some."""


class Arena:
    """Page-aligned buffers, numbered from 0, one behind the other: so many of each size, the sizes in turn."""

    def __init__(
        self, sizes: Sequence[tuple[int, int]], device: torch.device | None = None, huge_pages: bool = False
    ) -> None:
        """`sizes`: (slots, bytes of each); `device` None: the host. `huge_pages`: for memory that is read into past the
        page cache, which into small pages takes up to three times as long; making them takes longer, so elsewhere they
        do not pay."""
        assert not any(nbytes % PAGE for _, nbytes in sizes), sizes
        self.begins = list(accumulate((nbytes for slots, nbytes in sizes for _ in range(slots)), initial=0))
        """Offset of every slot, and of the end."""
        self._device = device
        self._map: mmap.mmap | None = None
        self._touchers: list[threading.Thread] = []
        self._is_closing = False
        if device is None or device.type == "cpu":
            self._map = anonymous(self.nbytes)
            if huge_pages:
                _ask_for_huge_pages(self._map)
            self._view = memoryview(self._map)
            self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        else:
            import torch

            self.bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    @cached_property
    def bytes(self) -> torch.Tensor:
        """All of it: uint8 [nbytes]."""
        import torch

        if self._map is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def device(self) -> torch.device:
        import torch

        return self._device or torch.device("cpu")

    def address(self, slot: int) -> int:
        """Where a slot begins (CPU arenas only)."""
        return self._begin + self.begins[slot]

    @property
    def nbytes(self) -> int:
        return self.begins[-1]

    def touch(self, threads: int = 1, slots: Sequence[range] | None = None) -> None:
        """Have the operating system back every page, or those of some slots, in threads of its own; contents are left
        alone.

        Pages that a read reaches first are backed by the read, only more slowly.
        """
        if self._map is None or _POPULATE_WRITE is None:
            return
        parts = [range(len(self.begins) - 1)] if slots is None else slots
        spans = [(self.begins[part.start], self.begins[part.stop]) for part in parts]
        steps = [
            (at, min(at + _POPULATE_BYTES, end)) for begin, end in spans for at in range(begin, end, _POPULATE_BYTES)
        ]
        shares = [steps[n::threads] for n in range(min(threads, len(steps)))]
        self._touchers = [
            threading.Thread(target=self._populate, args=(share,), name="smoe-touch", daemon=True) for share in shares
        ]
        for toucher in self._touchers:
            toucher.start()

    def wait_touched(self, seconds: float | None) -> None:
        """Wait until every page is backed, at most `seconds` (None: as long as it takes)."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for toucher in self._touchers:
            toucher.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def give_back(self, slot: int) -> None:
        """Let the operating system have a slot's memory, until it is written to again; what was there is lost."""
        assert self._map is not None and GIVES_BACK, "this memory cannot be given back in parts"
        begin, end = self.begins[slot : slot + 2]
        self._map.madvise(DONT_NEED, begin, end - begin)

    def _populate(self, steps: Sequence[tuple[int, int]]) -> None:
        assert _POPULATE_WRITE is not None
        begins_at, madvise = self._begin, system_madvise()
        for begin, end in steps:
            if self._is_closing:
                return
            if madvise(begins_at + begin, end - begin, _POPULATE_WRITE):
                return  # a kernel before 5.14

    def buffer(self, slot: int) -> memoryview:
        """A slot's bytes for a reader (CPU arenas only)."""
        return self._view[self.begins[slot] : self.begins[slot + 1]]

    @property
    def whole(self) -> memoryview:
        """All slots' bytes (CPU arenas only)."""
        return self._view

    def tensor(self, slot: int) -> torch.Tensor:
        """A slot's bytes: uint8 [bytes of the slot]."""
        return self.bytes[self.begins[slot] : self.begins[slot + 1]]

    def view(self, slot: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A weight inside a slot, `offset` bytes from its start, without copying."""
        begin = self.begins[slot] + offset
        count = dtype.itemsize
        for n in shape:
            count *= n
        return self.bytes[begin : begin + count].view(dtype).view(*shape)

    def close(self) -> None:
        """Give the memory back; views must not be used any more."""
        self._is_closing = True
        self.wait_touched(None)
        self.__dict__.pop("bytes", None)
        if self._map is not None:
            self._view.release()
            self._map = None  # unmapped when the last tensor on it is gone


def forget_peak(device: torch.device) -> None:
    """Measure the most memory that is allocated on a GPU from now on, not since the process began."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def system_madvise() -> Callable[[int, int, int], int]:
    """The system's own: Python's holds the interpreter lock, and so every other thread, until all pages are there."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call: Callable[[int, int, int], int] = function
    return call


def anonymous(nbytes: int) -> mmap.mmap:
    """Memory of this process alone: what could be shared, as Python's own default, gets no huge pages on most systems
    (docs/log/disk.md)."""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
