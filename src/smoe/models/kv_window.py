"""A view of some rows of a KV cache, for batches whose texts differ in length.

All texts end at the same index. Indices before the start of a text contain other data, which attention does not read
(`fastpath/attention.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smoe.models.kv_cache import CacheMemory, Positioned, RowCache, _PositionedSliding


class KVWindow(RowCache):
    """A KV cache that uses `rows` rows of the cache `whole`, from row `first` on. `start` and `length` are the indices
    of their texts."""

    def __init__(self, whole: RowCache, config: Any, first: int, rows: int) -> None:
        """Create the window. Raises `ValueError` if layers of the cache have a recurrent state."""
        if not whole.can_rewind:
            raise ValueError("this model has layers with a recurrent state, which have no positions and so no window")
        super().__init__(config, rows, whole.capacity_tokens)
        self._whole, self._first = whole, first
        self.layers = [
            _Part(self, layer, first) if type(layer) is Positioned else _SlidingPart(self, layer, first)
            for layer in whole.layers
        ]

    def place(self, start: int, lengths: Sequence[int]) -> None:
        """Set the index of the longest text's start, and the length of each text in tokens."""
        self.start, self.length = start, max(lengths)
        self.row_lengths = list(lengths) if len(lengths) > 1 else None
        self._pending, self.given = 0, None

    def begin_texts(self, given: Sequence[int]) -> None:
        """Let every row begin a new text. `given`: the number of real tokens of each text in the next pass."""
        self.row_lengths, self.given = [0] * len(given), list(given)

    def begin(self, tokens: int, rows: int) -> None:
        super().begin(tokens, rows)
        assert self.start + self.length + tokens <= self.capacity_tokens, "the texts must be moved to the front first"

    def back(self, first: int, rows: int, end: int) -> None:
        self._whole.back(self._first + first, rows, end)

    def is_in(self, memory: CacheMemory) -> bool:
        return self._whole.is_in(memory)

    def check_alive(self) -> None:
        self._whole.check_alive()

    @property
    def can_rewind(self) -> bool:
        return True

    @property
    def reserved_tokens(self) -> int:
        return 0  # counted by the whole cache

    @property
    def backed_tokens(self) -> int:
        return 0  # counted by the whole cache

    @property
    def nbytes(self) -> int:
        return 0  # counted by the whole cache


class _OfWhole:
    """One layer's keys and values in a window. Its storages are some rows of the storages in the whole cache."""

    _owner: RowCache
    _layer: Any
    _rows: slice

    @property
    def _store(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        store = self._layer._store
        return None if store is None else (store[0][self._rows], store[1][self._rows])

    @_store.setter
    def _store(self, store: None) -> None:
        """Do nothing on assignment, because a window has no storages of its own."""

    def _reserved(self, like: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if self._layer._store is None:
            rows = self._layer._owner.rows
            keys, values = (t.new_empty(1, t.shape[1], 1, t.shape[3]).expand(rows, -1, -1, -1) for t in like)
            self._layer._reserved((keys, values))
        store = self._store
        assert store is not None
        return store


class _Part(_OfWhole, Positioned):
    def __init__(self, owner: RowCache, layer: Any, first: int) -> None:
        super().__init__(owner)
        self._layer, self._rows = layer, slice(first, first + owner.rows)


class _SlidingPart(_OfWhole, _PositionedSliding):
    def __init__(self, owner: RowCache, layer: Any, first: int) -> None:
        super().__init__(owner, layer.sliding_window)
        self._layer, self._rows = layer, slice(first, first + owner.rows)
