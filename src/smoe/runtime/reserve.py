"""What workspace and KV cache leave unused, lent to experts and taken back in time.

    KV cache    |####..........|  positions that no text has yet
    workspace   |##............|  positions that this step has not
                     `--> spare slots, as many as fit; withdrawn, and their memory given back, before it is used

Before a pass, and before positions are written between passes, slots are withdrawn until there is room. They come back
when two passes in a row leave room for them: pieces of one prompt between steps of other texts do not take the same
slots again and again.
"""

from __future__ import annotations

from smoe.machine.native_heap import give_back_heap
from smoe.memory.arena import Arena
from smoe.policy.budget import Ledger
from smoe.runtime.caches import Caches
from smoe.runtime.execute import LayerExecutor

_WORTH_RETURNING = 4 * 2**20
"""Bytes of a step that the allocator is asked to return once they are free; less it may keep."""


class Reserve:
    """The bytes of a budget that are reserved for the largest step and the longest texts. Used by one thread at a
    time."""

    def __init__(
        self, ledger: Ledger, executor: LayerExecutor, arena: Arena, caches: Caches, position_bytes: int, positions: int
    ) -> None:
        """`position_bytes`: of the KV cache, for each of its `positions`; the rest of its entry is always in use."""
        self._ledger, self._executor, self._arena, self._caches = ledger, executor, arena, caches
        self._position_bytes = position_bytes
        self._state_bytes = ledger.demand.kv_cache_bytes - position_bytes * positions
        self.is_lent = any(pool.spare for pool in ledger.pools)
        """Whether experts have what is not in use."""
        self._step_bytes = 0
        """Of the last pass."""
        self._last_bytes = ledger.demand.reserve_bytes
        """In use in the last pass."""
        self._settled_bytes = ledger.demand.reserve_bytes
        """For which there is room at present."""
        self.peak_bytes = 0
        """The most that slots, caches and a step have taken together."""

    def begin(self, positions: int) -> None:
        """A pass over so many new positions, of all sequences together, begins."""
        before = self._step_bytes
        self._step_bytes = self._ledger.demand.step_bytes(positions)
        used = self._cache_bytes + self._step_bytes
        if self.is_lent:
            if before - self._step_bytes >= _WORTH_RETURNING:
                give_back_heap()
            self._make_room(max(used, self._last_bytes))
        self._last_bytes = used
        self.peak_bytes = max(self.peak_bytes, self._slots_bytes + used)

    def note_growth(self) -> None:
        """Positions are about to be written that have no memory yet."""
        if self.is_lent and self._cache_bytes > self._settled_bytes:
            self._make_room(self._cache_bytes)

    def _make_room(self, nbytes: int) -> None:
        """Have experts leave room for so many bytes of the reserve, and use what is beyond."""
        if nbytes == self._settled_bytes:
            return
        self._settled_bytes = nbytes
        arrivals = self._executor.arrivals
        for pool, slots in zip(arrivals.table.pools, self._ledger.slots_beside(nbytes), strict=True):
            for slot in arrivals.resize(pool, slots):
                self._arena.give_back(slot)
        self._executor.share_slots()

    @property
    def _cache_bytes(self) -> int:
        return self._state_bytes + self._position_bytes * self._caches.backed_tokens

    @property
    def _slots_bytes(self) -> int:
        pools = zip(self._executor.table.pools, self._ledger.demand.all_classes, strict=True)
        return sum((pool.cache_slots + pool.staging_slots) * each.slot_bytes for pool, each in pools)
