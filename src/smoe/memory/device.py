"""Expert slots on the device that computes: one arena, allocated and touched once, reused for ever.

On a CPU the arena is anonymous, page-aligned memory: reads land in it directly. Memory that was never used before is
slower to touch than the disk is to read, so it is touched when it is made. On a GPU it is one block of device memory.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from smoe.memory.store import PAGE

_POPULATE_WRITE = 23 if sys.platform == "linux" else None
"""madvise(2): back pages as if written to, without changing them; Python has no name for it."""
_POPULATE_BYTES = 64 * 2**20


class Arena:
    """`slots` buffers of `slot_bytes` each, contiguous and page-aligned."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        assert slot_bytes % PAGE == 0, slot_bytes
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.device = device
        self._map: mmap.mmap | None = None
        self._toucher: threading.Thread | None = None
        self._is_closing = False
        if device.type == "cpu":
            self._map = mmap.mmap(-1, slots * slot_bytes)
            _ask_for_huge_pages(self._map)
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            self._view = memoryview(self._map)
        else:
            self.bytes = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    def touch(self) -> None:
        """Have the operating system back every page, in a thread of its own; contents are left alone.

        Pages that a read reaches first are backed by the read, only more slowly.
        """
        if self._map is not None and _POPULATE_WRITE is not None:
            self._toucher = threading.Thread(target=self._populate, name="smoe-touch", daemon=True)
            self._toucher.start()

    def wait_touched(self, seconds: float | None) -> None:
        """Wait until every page is backed, at most `seconds` (None: as long as it takes)."""
        if self._toucher is not None:
            self._toucher.join(seconds)

    def _populate(self) -> None:
        assert self._map is not None and _POPULATE_WRITE is not None
        for begin in range(0, self.nbytes, _POPULATE_BYTES):
            if self._is_closing:
                return
            try:
                self._map.madvise(_POPULATE_WRITE, begin, min(_POPULATE_BYTES, self.nbytes - begin))
            except OSError:
                return  # a kernel before 5.14

    def buffer(self, slot: int) -> memoryview:
        """A slot's bytes for a reader (CPU arenas only)."""
        return self._view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def tensor(self, slot: int) -> torch.Tensor:
        """A slot's bytes: uint8 [slot_bytes]."""
        return self.bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def view(self, slot: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A weight inside a slot, `offset` bytes from its start, without copying."""
        begin = slot * self.slot_bytes + offset
        count = dtype.itemsize
        for n in shape:
            count *= n
        return self.bytes[begin : begin + count].view(dtype).view(*shape)

    def close(self) -> None:
        """Give the memory back; views must not be used any more."""
        self._is_closing = True
        if self._toucher is not None:
            self._toucher.join()
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self._map is not None:
            self._view.release()
            self._map = None  # unmapped when the last tensor on it is gone


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
