"""A window on some rows of a KV cache: a cache that computes on a part of another one's storages.

Rows of texts of their own lengths end at the same place. What is not a text's own lies before its start, and no
attention looks there (`fastpath/attention.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smoe.models.kv_cache import Positioned, RowCache, _PositionedSliding


class KVWindow(RowCache):
    """`rows` rows of `whole`, from `first` on; `start` and `length` say where their texts lie."""

    def __init__(self, whole: RowCache, config: Any, first: int, rows: int) -> None:
        """Raises `ValueError` for a cache whose layers have states without positions."""
        if not whole.can_rewind:
            raise ValueError("layers with a recurrent state have no positions, so no window")
        super().__init__(config, rows, whole.capacity_tokens)
        self._whole, self._first = whole, first
        self.layers = [
            _Part(self, layer, first) if type(layer) is Positioned else _SlidingPart(self, layer, first)
            for layer in whole.layers
        ]

    def place(self, start: int, lengths: Sequence[int]) -> None:
        """The texts, of so many tokens each, lie behind this start of the longest one."""
        self.start, self.length = start, max(lengths)
        self.row_lengths = list(lengths) if len(lengths) > 1 else None
        self._pending, self.given = 0, None

    def begin(self, tokens: int, rows: int) -> None:
        super().begin(tokens, rows)
        assert self.start + self.length + tokens <= self.capacity_tokens, "nobody has moved the texts to the front"

    def back(self, first: int, rows: int, end: int) -> None:
        self._whole.back(self._first + first, rows, end)

    def check_alive(self) -> None:
        self._whole.check_alive()

    @property
    def can_rewind(self) -> bool:
        return True

    @property
    def reserved_tokens(self) -> int:
        return 0  # the whole's

    @property
    def backed_tokens(self) -> int:
        return 0  # the whole's

    @property
    def nbytes(self) -> int:
        return 0  # the whole's


class _OfWhole:
    """Storages of another cache's layer, of some rows."""

    _owner: RowCache
    _layer: Any
    _rows: slice

    @property
    def _store(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        store = self._layer._store
        return None if store is None else (store[0][self._rows], store[1][self._rows])

    @_store.setter
    def _store(self, store: None) -> None:
        """Its own it has none."""

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
