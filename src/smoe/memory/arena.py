"""Expert slots on the computing device: one block of memory, the arena, which is allocated once and then reused.

On a CPU the arena is anonymous, page-aligned memory, and disk reads go directly into it. The first read into a slot
allocates the slot's pages. Allocating all pages when the arena is made delays the first token, and may evict the
model's file from the page cache before it is read (docs/log/disk.md). On a GPU the arena is one block of device memory.
An arena on a CPU imports torch only when a tensor is requested, so workers without torch can use it.
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
"""The flag of madvise(2) that allocates pages without changing their contents; Python has no name for it."""
_POPULATE_BYTES = 64 * 2**20
DONT_NEED: int = getattr(mmap, "MADV_DONTNEED", 0)
GIVES_BACK = sys.platform == "linux"
"""Whether parts of the memory can be returned to the operating system at once. Other systems take them only when memory
is short."""


class Arena:
    """Page-aligned buffers (slots), one after the other in memory. Slots of one size follow those of the previous size;
    all are numbered from 0 in this order."""

    def __init__(
        self, sizes: Sequence[tuple[int, int]], device: torch.device | None = None, huge_pages: bool = False
    ) -> None:
        """`sizes`: pairs of (number of slots, bytes per slot). `device`: None means host memory.

        `huge_pages`: use huge pages. Direct reads into small pages take up to three times as long. Allocating huge
        pages takes longer, so for other memory they do not pay.
        """
        assert not any(nbytes % PAGE for _, nbytes in sizes), sizes
        self.begins = list(accumulate((nbytes for slots, nbytes in sizes for _ in range(slots)), initial=0))
        """The offset of every slot in bytes, and at the end the total size."""
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
        """The memory of all slots as one uint8 tensor [nbytes]."""
        import torch

        if self._map is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def device(self) -> torch.device:
        import torch

        return self._device or torch.device("cpu")

    def address(self, slot: int) -> int:
        """Return the memory address of a slot (CPU arenas only)."""
        return self._begin + self.begins[slot]

    @property
    def nbytes(self) -> int:
        return self.begins[-1]

    @property
    def slots(self) -> int:
        """The number of slots in the arena, of all sizes together."""
        return len(self.begins) - 1

    def touch(self, threads: int = 1, slots: Sequence[range] | None = None) -> None:
        """Allocate the memory pages of all slots, or of the slot ranges `slots`, in background threads. The contents do
        not change.

        Without this call, the first read into a slot allocates its pages, which makes the read slower.
        """
        if self._map is None or _POPULATE_WRITE is None:
            return
        parts = [range(self.slots)] if slots is None else slots
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
        """Wait until the background threads have allocated all pages, for at most `seconds` (None: without limit)."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for toucher in self._touchers:
            toucher.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def give_back(self, slot: int) -> None:
        """Return a slot's memory to the operating system, which allocates it again at the next write. The contents are
        lost."""
        assert self._map is not None and GIVES_BACK, "this memory cannot be given back in parts"
        begin, end = self.begins[slot : slot + 2]
        self._map.madvise(DONT_NEED, begin, end - begin)

    def clear(self) -> None:
        """Set all bytes of all slots to zero, and return their memory to the operating system."""
        if self._map is not None:
            assert GIVES_BACK, "this system cannot clear memory without writing to it"
            self._map.madvise(DONT_NEED)

    def _populate(self, steps: Sequence[tuple[int, int]]) -> None:
        assert _POPULATE_WRITE is not None
        begins_at, madvise = self._begin, system_madvise()
        for begin, end in steps:
            if self._is_closing:
                return
            if madvise(begins_at + begin, end - begin, _POPULATE_WRITE):
                return  # kernels before 5.14 lack the flag

    def buffer(self, slot: int) -> memoryview:
        """Return the bytes of a slot as a memoryview, for code that reads a file into the slot (CPU arenas only)."""
        return self._view[self.begins[slot] : self.begins[slot + 1]]

    @property
    def whole(self) -> memoryview:
        """The bytes of all slots as a memoryview (CPU arenas only)."""
        return self._view

    def tensor(self, slot: int) -> torch.Tensor:
        """Return the bytes of a slot as a uint8 tensor."""
        return self.bytes[self.begins[slot] : self.begins[slot + 1]]

    def view(self, slot: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of this shape and dtype that is a view of a slot, `offset` bytes from the slot's
        beginning."""
        begin = self.begins[slot] + offset
        count = dtype.itemsize
        for n in shape:
            count *= n
        return self.bytes[begin : begin + count].view(dtype).view(*shape)

    def close(self) -> None:
        """Release the arena's memory. Views of slots must not be used afterwards."""
        self._is_closing = True
        self.wait_touched(None)
        self.__dict__.pop("bytes", None)
        if self._map is not None:
            self._view.release()
            self._map = None  # unmapped when its last tensor is deleted


def forget_peak(device: torch.device) -> None:
    """Reset a GPU's statistic of the peak of allocated memory, so that it is measured from now on."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def system_madvise() -> Callable[[int, int, int], int]:
    """Return the operating system's function madvise. Python's own holds the interpreter lock until all pages are
    allocated."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call: Callable[[int, int, int], int] = function
    return call


def anonymous(nbytes: int) -> mmap.mmap:
    """Return `nbytes` of private memory. (Shared memory, Python's default, gets no huge pages on most systems:
    docs/log/disk.md.)"""
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # some kernels lack transparent huge pages; they are only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
