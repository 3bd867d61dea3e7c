"""The KV caches within the memory budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from transformers import PretrainedConfig

from smoe.models.kv_cache import RowCache


class Caches:
    """The KV caches of one engine, `context_tokens * sequences` positions in all. A new cache invalidates the oldest
    ones where there is no room."""

    def __init__(
        self,
        config: PretrainedConfig,
        context_tokens: int,
        sequences: int,
        promised_bytes: int,
        on_growth: Callable[[], None] = lambda: None,
    ) -> None:
        """`promised_bytes`: the ledger's entry. `on_growth` is called before more of them are used."""
        self._config = config
        self._context_tokens, self._sequences = context_tokens, sequences
        self._promised_bytes = promised_bytes
        self.note_growth = on_growth
        self._made: list[weakref.ref[RowCache]] = []
        self.peak_bytes = 0

    def new(self, sequences: int) -> RowCache:
        """Return a cache of `sequences` rows, which share all positions."""
        return self._kept(self._made_of(sequences, self._reserved // sequences))

    def new_ones(self) -> list[RowCache]:
        """Return one cache for every sequence."""
        return [self._kept(self._made_of(1, self._context_tokens)) for _ in range(self._sequences)]

    @property
    def backed_tokens(self) -> int:
        """The number of positions of all sequences that may have memory."""
        return sum(cache.backed_tokens for cache in self._alive())

    def _made_of(self, rows: int, tokens: int) -> RowCache:
        return RowCache(self._config, rows, tokens, weakref.ref(self))

    def check(self) -> None:
        """Assert that the caches in use fit their entry of the ledger."""
        used = sum(cache.nbytes for cache in self._alive())
        self.peak_bytes = max(self.peak_bytes, used)
        assert used <= self._promised_bytes, f"the KV caches take {used} bytes, the ledger has {self._promised_bytes}"

    @property
    def _reserved(self) -> int:
        return self._context_tokens * self._sequences

    def _alive(self) -> list[RowCache]:
        return [cache for cache in (ref() for ref in self._made) if cache is not None]

    def _kept(self, cache: RowCache) -> RowCache:
        live = [each for each in self._alive() if each.reserved_tokens]
        while live and sum(each.reserved_tokens for each in live) + cache.reserved_tokens > self._reserved:
            live.pop(0).retire()
        self._made = [weakref.ref(each) for each in [*live, cache]]
        return cache
