"""The KV caches within the memory budget. Reserved memory that is not in use (workspace and KV cache) is lent to
experts, and taken back before it is needed.

In each line, `#` is memory in use and `.` is memory that experts may use:

    KV cache    |####..........|    unused: positions without text
    workspace   |##............|    unused: what this step does not need
                     `--> spare slots, as many as fit in the unused memory

Before a pass, and before positions are written between passes, slots are withdrawn until there is room. Slots return
after two successive passes that leave room for them. Otherwise chunks of one prompt between steps of other texts would
take the same slots again and again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from transformers import PretrainedConfig

from smoe.errors import ConfigError
from smoe.machine.native_heap import give_back_heap
from smoe.memory.arena import Arena
from smoe.models.kv_cache import RowCache
from smoe.policy.budget import Ledger
from smoe.runtime.execute import LayerExecutor
from smoe.setting_declaration import Count

_WORTH_RETURNING = 4 * 2**20
"""The smallest number of bytes, freed by a step, for which the allocator is asked to return memory to the operating
system."""


class Reserve:
    """The bytes of the memory budget that are reserved for the largest step and the longest texts. Only one thread at a
    time may use this object."""

    def __init__(
        self,
        ledger: Ledger,
        executor: LayerExecutor,
        arena: Arena,
        config: PretrainedConfig,
        context_tokens: int,
        sequences: int,
        position_bytes: int,
    ) -> None:
        """`config`: the model's configuration. `position_bytes`: the size of the KV cache for one of the
        `context_tokens * sequences` positions. The ledger's entry for the KV cache may be larger; its remainder is
        always in use."""
        self._ledger, self._executor, self._arena = ledger, executor, arena
        cache_bytes = ledger.demand.kv_cache_bytes
        self.caches = Caches(config, context_tokens, sequences, cache_bytes, self.note_growth)
        self._position_bytes = position_bytes
        self._state_bytes = cache_bytes - position_bytes * context_tokens * sequences
        self.is_lent = any(pool.spare for pool in ledger.pools)
        """Whether experts may use reserved memory that is not in use."""
        self._step_bytes = 0
        """Bytes of workspace that the last pass needed."""
        self._last_bytes = ledger.demand.reserve_bytes
        """Bytes in use in the last pass."""
        self._settled_bytes = ledger.demand.reserve_bytes
        """Bytes of the reserve that no slot occupies at present."""
        self.peak_bytes = 0
        """The highest number of bytes that slots, caches and a step have taken together."""

    def begin(self, positions: int, encodes_image: bool = False) -> None:
        """Make room for a pass over `positions` new positions, counted over all sequences. `encodes_image`: whether the
        image encoder runs within the pass."""
        demand = self._ledger.demand
        self._begin(max(demand.step_bytes(positions), demand.image_step_bytes if encodes_image else 0))

    def begin_image(self) -> None:
        """Make room for the image encoder's pass over one image."""
        self._begin(self._ledger.demand.image_step_bytes)

    def _begin(self, step_bytes: int) -> None:
        before, self._step_bytes = self._step_bytes, step_bytes
        used = self._cache_bytes + self._step_bytes
        if self.is_lent:
            if before - self._step_bytes >= _WORTH_RETURNING:
                give_back_heap()
            self._make_room(max(used, self._last_bytes))
        self._last_bytes = used
        self.peak_bytes = max(self.peak_bytes, self._slots_bytes + used)

    def note_growth(self) -> None:
        """Make room for positions that are about to be written and have no memory yet."""
        if self.is_lent and self._cache_bytes > self._settled_bytes:
            self._make_room(self._cache_bytes)

    def _make_room(self, nbytes: int) -> None:
        """Withdraw slots from experts, or return slots to them, so that `nbytes` of the reserved memory, and no more,
        are free of slots."""
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
        return self._state_bytes + self._position_bytes * self.caches.backed_tokens

    @property
    def _slots_bytes(self) -> int:
        pools = zip(self._executor.table.pools, self._ledger.demand.all_classes, strict=True)
        return sum((pool.cache_slots + pool.staging_slots) * each.slot_bytes for pool, each in pools)


class Caches:
    """The KV caches of one engine: at most `context_tokens * sequences` positions together. If a new cache does not
    fit, the oldest caches are invalidated."""

    def __init__(
        self,
        config: PretrainedConfig,
        context_tokens: int,
        sequences: int,
        promised_bytes: int,
        note_growth: Callable[[], None],
    ) -> None:
        """`promised_bytes`: the ledger's entry for KV caches, in bytes. `note_growth` is called before positions
        without memory are written."""
        self._config = config
        self._context_tokens, self._sequences = context_tokens, sequences
        self._promised_bytes = promised_bytes
        self.note_growth = note_growth
        self._made: list[weakref.ref[RowCache]] = []
        self.peak_bytes = 0

    @property
    def positions(self) -> int:
        """The number of positions that the budget allows, in all KV caches together."""
        return self._context_tokens * self._sequences

    def new(self, sequences: int) -> RowCache:
        """Return a KV cache of `sequences` rows. The rows share all positions that the budget allows. Raise
        `ConfigError` if there is not at least one position for each row."""
        allowed = Count(1, self.positions)
        if not allowed.admits(sequences):
            raise ConfigError(
                f"`sequences` is {sequences!r}; it must be {allowed.words}, because the sequences share the "
                f"{self.positions} positions of the KV cache. For more positions, load the model with a larger "
                "`context_tokens` or `max_sequences`",
                setting="sequences",
                given=sequences,
                allowed=allowed.words,
            )
        return self._kept(self._made_of(sequences, self.positions // sequences))

    def new_ones(self) -> list[RowCache]:
        """Return as many KV caches of one row as the budget allows sequences."""
        return [self._kept(self._made_of(1, self._context_tokens)) for _ in range(self._sequences)]

    @property
    def backed_tokens(self) -> int:
        """The number of positions, in all KV caches, for which memory may be allocated."""
        return sum(cache.backed_tokens for cache in self._alive())

    def _made_of(self, rows: int, tokens: int) -> RowCache:
        return RowCache(self._config, rows, tokens, weakref.ref(self))

    def check(self) -> None:
        """Assert that the KV caches in use take no more bytes than the ledger's entry for them."""
        used = sum(cache.nbytes for cache in self._alive())
        self.peak_bytes = max(self.peak_bytes, used)
        assert used <= self._promised_bytes, f"the KV caches take {used} bytes, the ledger has {self._promised_bytes}"

    def _alive(self) -> list[RowCache]:
        return [cache for cache in (ref() for ref in self._made) if cache is not None]

    def _kept(self, cache: RowCache) -> RowCache:
        live = [each for each in self._alive() if each.reserved_tokens]
        while live and sum(each.reserved_tokens for each in live) + cache.reserved_tokens > self.positions:
            live.pop(0).retire()
        self._made = [weakref.ref(each) for each in [*live, cache]]
        return cache
