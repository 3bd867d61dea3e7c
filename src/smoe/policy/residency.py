"""Which expert is where: the slot table, the only record of residency.

Slots are numbers. They fall into two sets that exchange members without copying anything: *cache* slots
hold experts until a policy evicts them, *staging* slots hold what passes through (a prefill larger than the
cache, a prefetch that has not proven itself). Every slot is at all times in exactly one of

    free cache | free staging | in flight (cache or staging) | ready (cache or staging)

and `check` asserts it. A plan reads the table, the engine changes it between plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from smoe.expert import EXACT, Copy
from smoe.policy.plan import Load, Promotion


class SlotTable:
    """Residency of one device: `cache_slots + staging_slots` slots, numbered from 0."""

    def __init__(self, cache_slots: int, staging_slots: int) -> None:
        assert cache_slots > 0 and staging_slots >= 0, (cache_slots, staging_slots)
        self.cache_slots = cache_slots
        self.staging_slots = staging_slots
        self.ready: dict[Copy, int] = {}
        self.inflight: dict[Copy, int] = {}
        self.staged: set[Copy] = set()
        """Copies, ready or in flight, that sit in a staging slot."""
        self.free_cache: deque[int] = deque(range(cache_slots))
        self.free_staging: deque[int] = deque(range(cache_slots, cache_slots + staging_slots))

    def __contains__(self, copy: Copy) -> bool:
        """Whether the copy is ready."""
        return copy in self.ready

    def cached(self) -> Iterator[Copy]:
        """Ready copies in cache slots: the candidates for eviction."""
        return (copy for copy in self.ready if copy not in self.staged)

    def begin(self, load: Load) -> None:
        """A load starts: its victim is forgotten, its slot is in flight."""
        copy, slot, victim = load.copy, load.slot, load.victim
        assert copy not in self.ready and copy not in self.inflight, f"{copy} is here already"
        if victim is not None:
            assert self.ready[victim] == slot and victim not in self.staged, (load, self.ready.get(victim))
            del self.ready[victim]
        else:
            (self.free_cache if load.keep else self.free_staging).remove(slot)
        self.inflight[copy] = slot
        if not load.keep:
            self.staged.add(copy)

    def arrive(self, copy: Copy) -> None:
        """A load has ended well."""
        self.ready[copy] = self.inflight.pop(copy)

    def fail(self, copy: Copy) -> None:
        """A load has ended badly or was cancelled: its slot is free again and holds nothing."""
        self._free(copy, self.inflight.pop(copy))

    def release(self, copy: Copy) -> None:
        """A ready copy in a staging slot has served; forget it."""
        assert copy in self.staged, f"{copy} is not staged"
        self._free(copy, self.ready.pop(copy))

    def promote(self, promotion: Promotion) -> None:
        """Turn the staging slot of a copy into a cache slot; the victim's slot becomes the free staging slot."""
        copy, victim, _ = promotion
        assert copy in self.staged, f"{copy} is not staged"
        self.staged.discard(copy)
        freed = self.free_cache.popleft() if victim is None else self.ready.pop(victim)
        self.free_staging.append(freed)

    def clear(self) -> None:
        """Forget everything, as if new."""
        self.ready.clear()
        self.settle()

    def settle(self) -> None:
        """After a change that was interrupted anywhere: keep what is ready in cache slots, free all other slots.

        Only `ready` is believed: a copy enters it after its load has ended and leaves it before its slot is written.
        """
        self.ready = dict([item for item in self.ready.items() if item[0] not in self.staged][: self.cache_slots])
        self.inflight.clear()
        self.staged.clear()
        free = sorted(set(range(self.cache_slots + self.staging_slots)) - set(self.ready.values()))
        self.free_cache = deque(free[: self.cache_slots - len(self.ready)])
        self.free_staging = deque(free[self.cache_slots - len(self.ready) :])

    def _free(self, copy: Copy, slot: int) -> None:
        if copy in self.staged:
            self.staged.discard(copy)
            self.free_staging.append(slot)
        else:
            self.free_cache.append(slot)

    def check(self) -> None:
        """Assert that every slot is in exactly one state and the two sets kept their sizes."""
        used = [*self.ready.values(), *self.inflight.values(), *self.free_cache, *self.free_staging]
        assert sorted(used) == list(range(self.cache_slots + self.staging_slots)), used
        assert not self.ready.keys() & self.inflight.keys(), self.ready.keys() & self.inflight.keys()
        assert self.staged <= self.ready.keys() | self.inflight.keys(), self.staged
        assert len(self.free_staging) + len(self.staged) == self.staging_slots, (self.free_staging, self.staged)


class ExpertsAtHand:
    """The experts of one layer that cost no load, as a set to ask: resident, staged or under way."""

    __slots__ = ("_layer", "_table")

    def __init__(self, layer: int, table: SlotTable) -> None:
        self._layer = layer
        self._table = table

    def __contains__(self, expert: object) -> bool:
        copy = (self._layer, expert, EXACT)
        return copy in self._table.ready or copy in self._table.inflight


class ExpertsUnderWay:
    """Of the experts at hand, those that have to be waited for."""

    __slots__ = ("_layer", "_table")

    def __init__(self, layer: int, table: SlotTable) -> None:
        self._layer = layer
        self._table = table

    def __contains__(self, expert: object) -> bool:
        return (self._layer, expert, EXACT) in self._table.inflight
