"""The host tier of a machine whose device has a memory of its own: an arena, pinned for a GPU, that caches the disk.

Inclusive where all experts fit; smaller, it forgets first what the device holds anyway (a copy there needs none
here), then what was used longest ago. Machines without a GPU have no such tier: there the device arena already is
host memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from smoe.expert import Copy
from smoe.memory.device import Arena


class Lease(NamedTuple):
    """A host slot that cannot be evicted until it is given back."""

    copy: Copy
    slot: int
    is_hit: bool


class HostTier:
    """Pinned slots. Used by several reading threads; every method takes the lock."""

    def __init__(self, slots: int, slot_bytes: int, is_on_device: Callable[[Copy], bool]) -> None:
        self.arena = Arena(slots, slot_bytes, torch.device("cpu"))
        self._is_on_device = is_on_device
        self._lock = threading.Condition()
        self._slots: OrderedDict[Copy, int] = OrderedDict()
        self._leased: set[Copy] = set()
        self._free = list(range(slots))
        self._copying: dict[int, Any] = {}
        self._is_pinned = _pin(self.arena)

    def lease(self, copy: Copy) -> Lease:
        """Where `copy` is, or a slot to fill; waits where every slot is leased."""
        with self._lock:
            if copy in self._slots:
                self._slots.move_to_end(copy)
                self._leased.add(copy)
                return Lease(copy, self._slots[copy], True)
            slot = self._take()
            while slot is None:
                self._lock.wait()
                slot = self._take()
            self._slots[copy] = slot
            self._leased.add(copy)
            event = self._copying.pop(slot, None)
        if event is not None:
            event.synchronize()  # the old contents may still be on their way to the device
        return Lease(copy, slot, False)

    def give_back(self, lease: Lease, event: Any, is_valid: bool) -> None:
        """End a lease; `event` fires when the slot's bytes have reached the device."""
        with self._lock:
            self._leased.discard(lease.copy)
            if is_valid:
                self._copying[lease.slot] = event
            else:
                self._free.append(self._slots.pop(lease.copy))
            self._lock.notify()

    def close(self) -> None:
        with self._lock:
            if self._is_pinned:
                torch.cuda.cudart().cudaHostUnregister(self.arena.bytes.data_ptr())
            self.arena.close()

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        evictable = [copy for copy in self._slots if copy not in self._leased]
        victim = next((copy for copy in evictable if self._is_on_device(copy)), next(iter(evictable), None))
        return None if victim is None else self._slots.pop(victim)


def _pin(arena: Arena) -> bool:
    """Page-lock the arena for asynchronous copies; False where the driver refuses (copies then block)."""
    if not torch.cuda.is_available():
        return False
    result = torch.cuda.cudart().cudaHostRegister(arena.bytes.data_ptr(), arena.nbytes, 0)
    return int(result) == 0
