"""Lends unused workspace and KV cache to experts, and takes them back in time.

    KV cache    |####..........|  positions without text
    workspace   |##............|  positions beyond this step's
                     `--> spare slots, as many as fit; withdrawn, and their memory freed, before it is needed

Before a pass, and before positions are written between passes, slots are withdrawn until there is room. They return
after two successive passes that leave room for them, so that pieces of one prompt between steps of other texts do not
take the same slots again and again.
"""

from __future__ import annotations

from smoe.machine.native_heap import give_back_heap
from smoe.memory.arena import Arena
from smoe.policy.budget import Ledger
from smoe.runtime.caches import Caches
from smoe.runtime.execute import LayerExecutor

_WORTH_RETURNING = 4 * 2**20
"""The least bytes of a finished step that the allocator must return to the system."""


class Reserve:
    """The bytes of a budget that are reserved for the largest step and the longest texts. One thread at a time may use
    it."""

    def __init__(
        self, ledger: Ledger, executor: LayerExecutor, arena: Arena, caches: Caches, position_bytes: int, positions: int
    ) -> None:
        """`position_bytes`: bytes of the KV cache for each of `positions`; the rest of its entry is always in use."""
        self._ledger, self._executor, self._arena, self._caches = ledger, executor, arena, caches
        self._position_bytes = position_bytes
        self._state_bytes = ledger.demand.kv_cache_bytes - position_bytes * positions
        self.is_lent = any(pool.spare for pool in ledger.pools)
        """Whether experts use what is unused."""
        self._step_bytes = 0
        """Bytes of the last pass's step."""
        self._last_bytes = ledger.demand.reserve_bytes
        """Bytes in use in the last pass."""
        self._settled_bytes = ledger.demand.reserve_bytes
        """Bytes of the reserve that are free of experts at present."""
        self.peak_bytes = 0
        """The highest number of bytes that slots, caches and a step have taken together."""

    def begin(self, positions: int) -> None:
        """Start a pass over `positions` new positions of all sequences together."""
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
        """Make room for positions without memory that are about to be written."""
        if self.is_lent and self._cache_bytes > self._settled_bytes:
            self._make_room(self._cache_bytes)

    def _make_room(self, nbytes: int) -> None:
        """Withdraw or return slots so that exactly `nbytes` of the reserve are free of experts."""
        if nbytes == self._settled_bytes:
            return
        self._settled_bytes = nbytes
        arrivals = self._executor.arrivals
        for pool, slots in zip(arrivals.table.pools, self._ledger.slots_after(nbytes), strict=True):
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
