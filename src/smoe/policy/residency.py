"""The slot table, which alone records which expert is in which slot.

Slots are numbered. There are two sets of slots, which exchange members without copying data. *Cache* slots hold experts
until a policy evicts them. *Staging* slots hold experts that are used once: in a prefill larger than the cache, or for
a prefetch before its use. Every slot is always in exactly one of these states, which `check` asserts:

    free cache | free staging | in flight (cache or staging) | ready (cache or staging) | withdrawn

A policy that plans only reads the table. The engine changes it between plans.

If layers have experts of different sizes, or experts have low-precision copies, there is a pool of slots for each size,
with cache and staging slots of its own. Slot numbers continue from pool to pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from itertools import chain
from typing import NamedTuple

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.plan import Load, Promotion


class PoolSize(NamedTuple):
    """The numbers of cache and staging slots of one size, and the copies for which they are."""

    cache: int
    staging: int
    layers: tuple[int, ...] = ()
    """The layers whose experts the slots hold; empty: all layers."""
    form: int = EXACT
    """The format of the copies that the slots hold."""
    spare: int = 0
    """The number of additional cache slots, which are withdrawn at first."""


class SlotPool:
    """The slots of one size, numbered from `first`: `cache_slots + staging_slots` slots in use, and the slots that are
    withdrawn (out of use)."""

    __slots__ = ("end", "first", "free_cache", "free_staging", "staging_slots", "withdrawn")

    def __init__(self, first: int, cache_slots: int, staging_slots: int, spare_slots: int = 0) -> None:
        assert cache_slots > 0 and staging_slots >= 0 and spare_slots >= 0, (cache_slots, staging_slots, spare_slots)
        self.first = first
        self.staging_slots = staging_slots
        in_use = first + cache_slots + staging_slots
        self.end = in_use + spare_slots
        """The number after the last slot."""
        self.free_cache: deque[int] = deque(range(first, first + cache_slots))
        self.free_staging: deque[int] = deque(range(first + cache_slots, in_use))
        self.withdrawn = list(range(self.end - 1, in_use - 1, -1))
        """Cache slots whose memory is used for something else at present."""

    @property
    def cache_slots(self) -> int:
        """The number of cache slots in use."""
        return self.end - self.first - self.staging_slots - len(self.withdrawn)

    def give(self, slots: int) -> None:
        """Put the withdrawn slots `slots` into use again."""
        for _ in range(slots):
            self.free_cache.append(self.withdrawn.pop())

    def withdraw(self, slot: int) -> None:
        """Take a free cache slot out of use."""
        self.free_cache.remove(slot)
        self.withdrawn.append(slot)

    def settle(self, used: set[int]) -> None:
        """Mark the slots in `used` as occupied, and all others as free except the withdrawn slots."""
        used = used.union(self.withdrawn)
        free = [slot for slot in range(self.first, self.end) if slot not in used]
        in_cache = len(free) - self.staging_slots
        self.free_cache, self.free_staging = deque(free[:in_cache]), deque(free[in_cache:])


class SlotTable:
    """Records which experts are in which slots of one device. The slots may have several sizes."""

    def __init__(self, *sizes: PoolSize) -> None:
        self.pools: list[SlotPool] = []
        self._pool_of: dict[tuple[int, int], SlotPool] = {}
        self._pool_for_all: dict[int, SlotPool] = {}
        self.has_low = any(size.form == LOW for size in sizes)
        """Whether there are slots for low-precision copies."""
        for cache, staging, layers, form, spare in sizes:
            self.pools.append(SlotPool(self.slots, cache, staging, spare))
            self._pool_of |= dict.fromkeys(((layer, form) for layer in layers), self.pools[-1])
            if not layers:
                assert form not in self._pool_for_all, sizes
                self._pool_for_all[form] = self.pools[-1]
        self.ready: dict[ExpertKey, int] = {}
        self.inflight: dict[ExpertKey, int] = {}
        self.arrived = 0
        """The number of loads that have succeeded."""
        self.staged: set[ExpertKey] = set()
        """Copies in staging slots, ready or in flight."""

    @property
    def slots(self) -> int:
        """The number of slots of all sizes, including withdrawn ones."""
        return self.pools[-1].end if self.pools else 0

    def pool(self, layer: int, form: int = EXACT) -> SlotPool:
        """Return the slots for copies of a layer's experts in the format `form`."""
        return self._pool_of[layer, form] if self._pool_of else self._pool_for_all[form]

    def pool_of(self, key: ExpertKey) -> SlotPool:
        """Return the pool of slots for this copy."""
        return self.pool(key[0], key[2])

    def __contains__(self, key: ExpertKey) -> bool:
        """Return whether the copy is in memory, completely loaded."""
        return key in self.ready

    def is_at_hand(self, key: ExpertKey) -> bool:
        """Return whether the copy is in memory or in flight, so that it need not be loaded."""
        return key in self.ready or key in self.inflight

    def cached(self) -> Iterator[ExpertKey]:
        """Return the completely loaded copies in cache slots, which are the candidates for eviction."""
        return (key for key in self.ready if key not in self.staged)

    def begin(self, load: Load) -> None:
        """Record that a load starts: evict the load's victim, and mark the slot as in flight."""
        key, slot, victim = load.key, load.slot, load.victim
        assert key not in self.ready and key not in self.inflight, f"{key} is here already"
        if victim is not None:
            assert self.ready[victim] == slot and victim not in self.staged, (load, self.ready.get(victim))
            del self.ready[victim]
        else:
            pool = self.pool_of(key)
            (pool.free_cache if load.keep else pool.free_staging).remove(slot)
        self.inflight[key] = slot
        if not load.keep:
            self.staged.add(key)

    def arrive(self, key: ExpertKey) -> None:
        """Record that the load of `key` has ended."""
        self.ready[key] = self.inflight.pop(key)
        self.arrived += 1

    def fail(self, key: ExpertKey) -> None:
        """Record that the load of `key` has failed or was cancelled, and free its slot."""
        self._free(key, self.inflight.pop(key))

    def release(self, key: ExpertKey) -> None:
        """Free the slot of a staged copy after its use."""
        assert key in self.staged, f"{key} is not staged"
        self._free(key, self.ready.pop(key))

    def promote(self, promotion: Promotion) -> None:
        """Make the staging slot of a copy a cache slot. The victim's slot, or a free cache slot, becomes a free staging
        slot."""
        key, victim, _ = promotion
        assert key in self.staged, f"{key} is not staged"
        self.staged.discard(key)
        pool = self.pool_of(key)
        freed = pool.free_cache.popleft() if victim is None else self.ready.pop(victim)
        pool.free_staging.append(freed)

    def discard(self, key: ExpertKey) -> int:
        """Evict a resident. Return its cache slot, which is free from now on."""
        assert key not in self.staged, f"{key} is staged"
        slot = self.ready.pop(key)
        self.pool_of(key).free_cache.append(slot)
        return slot

    def clear(self) -> None:
        """Evict all copies."""
        self.ready.clear()
        self.settle()

    def settle(self) -> None:
        """Make the table consistent after a change that was interrupted at any point. Completely loaded copies in cache
        slots stay, and all other slots become free.

        Only `ready` can be relied on: a copy is added after its load has ended, and removed before its slot is
        overwritten.
        """
        room = {pool.first: pool.cache_slots for pool in self.pools}
        now_ready: dict[ExpertKey, int] = {}
        for key, slot in self.ready.items():
            first = self.pool_of(key).first
            if key not in self.staged and room[first]:
                room[first] -= 1
                now_ready[key] = slot
        self.ready = now_ready
        self.inflight.clear()
        self.staged.clear()
        for pool in self.pools:
            pool.settle(set(now_ready.values()))

    def _free(self, key: ExpertKey, slot: int) -> None:
        pool = self.pool_of(key)
        if key in self.staged:
            self.staged.discard(key)
            pool.free_staging.append(slot)
        else:
            pool.free_cache.append(slot)

    def check(self) -> None:
        """Assert that every slot is in exactly one state, that there are as many cache and staging slots as declared,
        and that every copy is in a slot of its size."""
        free = chain.from_iterable((*pool.free_cache, *pool.free_staging, *pool.withdrawn) for pool in self.pools)
        used = [*self.ready.values(), *self.inflight.values(), *free]
        assert sorted(used) == list(range(self.slots)), used
        assert not self.ready.keys() & self.inflight.keys(), self.ready.keys() & self.inflight.keys()
        assert self.staged <= self.ready.keys() | self.inflight.keys(), self.staged
        for pool in self.pools:
            staged = sum(self.pool_of(key) is pool for key in self.staged)
            assert len(pool.free_staging) + staged == pool.staging_slots, (pool.free_staging, self.staged)
        for key, slot in chain(self.ready.items(), self.inflight.items()):
            assert slot in range(self.pool_of(key).first, self.pool_of(key).end), (key, slot)


class ExpertsAtHand:
    """A container of the experts of one layer that need no load, because they are in memory or in flight. For the
    experts in `low`, a low-precision copy suffices."""

    __slots__ = ("_layer", "_low", "_table")

    def __init__(self, layer: int, table: SlotTable, low: Container[int] = ()) -> None:
        self._layer = layer
        self._table = table
        self._low = low

    def __contains__(self, expert: object) -> bool:
        return self._has((self._layer, expert, EXACT)) or (
            expert in self._low and self._has((self._layer, expert, LOW))
        )

    def _has(self, key: object) -> bool:
        return key in self._table.ready or key in self._table.inflight


class ExpertsUnderWay(ExpertsAtHand):
    """A container of the experts of one layer that are in flight."""

    __slots__ = ()

    def _has(self, key: object) -> bool:
        return key in self._table.inflight


class LowCopiesHere:
    """A container of the experts of one layer whose low-precision copies are in memory."""

    __slots__ = ("_layer", "_ready")

    def __init__(self, layer: int, table: SlotTable) -> None:
        self._layer = layer
        self._ready = table.ready

    def __contains__(self, expert: object) -> bool:
        return (self._layer, expert, LOW) in self._ready
