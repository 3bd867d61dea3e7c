"""The host tier of a machine whose device has a memory of its own: an arena, locked in RAM for a GPU, that caches the
disk.

Inclusive where all experts fit; smaller, it forgets first what the device holds anyway (a copy there needs none
here), then what was used longest ago. Machines without a GPU have no such tier: there the device arena already is
host memory.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from smoe.expert import ExpertKey
from smoe.memory.arena import Arena

if TYPE_CHECKING:
    from smoe.memory.page_lock import PageRegistry


class Lease(NamedTuple):
    """A host slot that cannot be evicted until it is given back."""

    key: ExpertKey
    slot: int
    is_hit: bool
    """Whether the expert is there; else the owner of the lease fills the slot and sets this."""


class HostTier:
    """Used by several reading threads; every method takes the lock.

    A lease lasts until the device, or the CPU, has read the last byte: links return when a copy has ended. A copy may
    be leased several times at once, and is evictable when the last lease is given back.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        size_of: Callable[[ExpertKey], int],
        goes_first: Callable[[ExpertKey], bool],
        registry: PageRegistry | None = None,
        huge_pages: bool = False,
        touching_threads: int = 1,
    ) -> None:
        """`sizes`: (slots, bytes of each); `size_of`: which of them a copy has; `goes_first`: whether a copy is
        forgotten before others; `huge_pages`: as of an `Arena`; `touching_threads` back its pages
        before they are locked."""
        self.arena = Arena(sizes, huge_pages=huge_pages)
        self._size_of = size_of
        self._goes_first = goes_first
        self._registry = registry
        self._lock = threading.Condition()
        self._slots: OrderedDict[ExpertKey, int] = OrderedDict()
        self._leased: Counter[ExpertKey] = Counter()
        self._filling: set[ExpertKey] = set()
        numbers = iter(range(len(self.arena.begins) - 1))
        self._free = [list(islice(numbers, slots)) for slots, _ in sizes]
        self._locked: list[int] = []
        """Addresses of what the driver has locked."""
        if registry is not None:
            from smoe.memory.page_lock import lock_pages

            self._locked = lock_pages(self.arena, registry, touching_threads)

    def lease(self, key: ExpertKey) -> Lease:
        """Where `key` is, or a slot to fill; waits where every slot is leased, or another thread is filling it."""
        with self._lock:
            while True:
                if key in self._slots and key not in self._filling:
                    self._slots.move_to_end(key)
                    self._leased[key] += 1
                    return Lease(key, self._slots[key], True)
                slot = None if key in self._filling else self._take(key)
                if slot is not None:
                    self._slots[key] = slot
                    self._filling.add(key)
                    self._leased[key] += 1
                    return Lease(key, slot, False)
                self._lock.wait()

    def has(self, key: ExpertKey) -> bool:
        """Whether the expert is there, or being filled in, just now."""
        with self._lock:
            return key in self._slots

    def note_filled(self, lease: Lease) -> None:
        """The expert is in the slot of a lease that was no hit."""
        with self._lock:
            self._filling.discard(lease.key)
            self._lock.notify_all()

    def give_back(self, lease: Lease) -> None:
        """End a lease; a slot that was to be filled and was not is free again."""
        with self._lock:
            self._leased[lease.key] -= 1
            if not self._leased[lease.key]:
                del self._leased[lease.key]
            if not lease.is_hit and lease.key in self._filling:
                self._filling.discard(lease.key)
                self._free[self._size_of(lease.key)].append(self._slots.pop(lease.key))
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            for address in self._locked:
                assert self._registry is not None
                self._registry.unregister(address)
            self._locked = []
            self.arena.close()

    def _take(self, wanted: ExpertKey) -> int | None:
        size = self._size_of(wanted)
        if self._free[size]:
            return self._free[size].pop()
        evictable = [key for key in self._slots if key not in self._leased and self._size_of(key) == size]
        victim = next((key for key in evictable if self._goes_first(key)), next(iter(evictable), None))
        return None if victim is None else self._slots.pop(victim)
