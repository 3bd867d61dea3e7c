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

from smoe.expert import EXACT, ExpertKey
from smoe.policy.plan import Load, Promotion


class SlotTable:
    """Residency of one device: `cache_slots + staging_slots` slots, numbered from 0."""

    def __init__(self, cache_slots: int, staging_slots: int) -> None:
        assert cache_slots > 0 and staging_slots >= 0, (cache_slots, staging_slots)
        self.cache_slots = cache_slots
        self.staging_slots = staging_slots
        self.ready: dict[ExpertKey, int] = {}
        self.inflight: dict[ExpertKey, int] = {}
        self.staged: set[ExpertKey] = set()
        """Copies, ready or in flight, that sit in a staging slot."""
        self.free_cache: deque[int] = deque(range(cache_slots))
        self.free_staging: deque[int] = deque(range(cache_slots, cache_slots + staging_slots))

    def __contains__(self, key: ExpertKey) -> bool:
        """Whether the copy is ready."""
        return key in self.ready

    def is_at_hand(self, key: ExpertKey) -> bool:
        """Whether the copy is ready or under way, so that nothing has to be loaded."""
        return key in self.ready or key in self.inflight

    def cached(self) -> Iterator[ExpertKey]:
        """Ready copies in cache slots: the candidates for eviction."""
        return (key for key in self.ready if key not in self.staged)

    def begin(self, load: Load) -> None:
        """A load starts: its victim is forgotten, its slot is in flight."""
        key, slot, victim = load.key, load.slot, load.victim
        assert key not in self.ready and key not in self.inflight, f"{key} is here already"
        if victim is not None:
            assert self.ready[victim] == slot and victim not in self.staged, (load, self.ready.get(victim))
            del self.ready[victim]
        else:
            (self.free_cache if load.keep else self.free_staging).remove(slot)
        self.inflight[key] = slot
        if not load.keep:
            self.staged.add(key)

    def arrive(self, key: ExpertKey) -> None:
        """A load has ended well."""
        self.ready[key] = self.inflight.pop(key)

    def fail(self, key: ExpertKey) -> None:
        """A load has ended badly or was cancelled: its slot is free again and holds nothing."""
        self._free(key, self.inflight.pop(key))

    def release(self, key: ExpertKey) -> None:
        """A ready copy in a staging slot has served; forget it."""
        assert key in self.staged, f"{key} is not staged"
        self._free(key, self.ready.pop(key))

    def promote(self, promotion: Promotion) -> None:
        """Turn the staging slot of a copy into a cache slot; the victim's slot becomes the free staging slot."""
        key, victim, _ = promotion
        assert key in self.staged, f"{key} is not staged"
        self.staged.discard(key)
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

    def _free(self, key: ExpertKey, slot: int) -> None:
        if key in self.staged:
            self.staged.discard(key)
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
        key = (self._layer, expert, EXACT)
        return key in self._table.ready or key in self._table.inflight


class ExpertsUnderWay:
    """Of the experts at hand, those that have to be waited for."""

    __slots__ = ("_layer", "_table")

    def __init__(self, layer: int, table: SlotTable) -> None:
        self._layer = layer
        self._table = table

    def __contains__(self, expert: object) -> bool:
        return (self._layer, expert, EXACT) in self._table.inflight
