"""The host tier, for devices with their own memory: a cache in RAM of experts from disk. For a GPU its memory is
page-locked.

If not all experts fit, copies that the device also holds are evicted first, then the least recently used ones. Machines
without such a device have no host tier, because their slots are in RAM themselves.
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
    """The right to use a slot of the host tier. The slot cannot be evicted until the lease ends."""

    key: ExpertKey
    slot: int
    is_hit: bool
    """Whether the slot contains the expert. If not, the holder of the lease must read the expert into it."""


class HostTier:
    """A cache of experts in host memory. Several reading threads may use it at once, because every method locks it.

    A slot is leased while an expert is read into it, copied from it or computed from it. Several leases of a slot may
    exist at once; after the last one has ended, the slot may be evicted.
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
        """`sizes`: pairs of (number of slots, bytes per slot). `size_of` returns the index in `sizes` for an expert;
        `goes_first` returns whether an expert is evicted before others. `huge_pages`: as for an `Arena`.
        `touching_threads`: the number of threads that allocate the pages before they are locked."""
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
        """The addresses of the ranges of memory that the GPU's driver has locked."""
        if registry is not None:
            from smoe.memory.page_lock import lock_pages

            self._locked = lock_pages(self.arena, registry, touching_threads)

    def lease(self, key: ExpertKey) -> Lease:
        """Return a lease of the slot that contains the expert, or of a slot into which the expert must be read.

        Waits while all slots are leased, or while another thread reads the expert.
        """
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
        """Return whether the expert is in a host slot or is being read into one."""
        with self._lock:
            return key in self._slots

    def note_filled(self, lease: Lease) -> None:
        """Record that the expert has been read into the leased slot."""
        with self._lock:
            self._filling.discard(lease.key)
            self._lock.notify_all()

    def give_back(self, lease: Lease) -> None:
        """End a lease. If the expert was not read into the slot, the slot becomes free."""
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
