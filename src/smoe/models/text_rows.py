"""The rows of a KV cache and the positions of their texts, moved so that several rows can be decoded together.

row 0   . . . . a a a a a a |          rows 0 and 1 end at the same index: their next tokens are written
row 1   . b b b b b b b b b |          together, through one window (`kv_window.py`)
row 2   c c c c             .          in prefill, through a window of its own
row 3   d d d d d d d       .          finished; stays in case its text is continued
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smoe.models.kv_cache import RowCache
from smoe.models.kv_window import KVWindow


class TextRows:
    """The texts in the rows of the KV cache `whole`."""

    def __init__(self, whole: RowCache, config: Any) -> None:
        self.whole = whole
        self._config = config
        self.starts = [0] * whole.rows
        self.lengths = [0] * whole.rows
        self._windows: dict[tuple[int, int], KVWindow] = {}

    @property
    def capacity_tokens(self) -> int:
        """The number of positions in every row of the KV cache."""
        return self.whole.capacity_tokens

    def window(self, first: int, rows: int = 1) -> KVWindow:
        """Return a window of the KV cache with `rows` rows from row `first` on, with room for the next token. The texts
        of these rows must end at the same index."""
        lengths = self.lengths[first : first + rows]
        if self.starts[first] + lengths[0] >= self.capacity_tokens:
            self._move_to_front(range(first, first + rows))
        ends = {self.starts[row] + self.lengths[row] for row in range(first, first + rows)}
        assert len(ends) == 1, f"rows end at {sorted(ends)}"
        window = self._windows.get((first, rows))
        if window is None:
            window = self._windows[first, rows] = KVWindow(self.whole, self._config, first, rows)
        window.place(ends.pop() - max(lengths), lengths)
        return window

    def new_window(self, first: int, given: Sequence[int]) -> KVWindow:
        """Return a window of rows from `first` on for new texts. `given`: the number of real tokens of each text in the
        next pass."""
        rows = range(first, first + len(given))
        for row in rows:
            self.starts[row] = self.lengths[row] = 0
        window = self.window(first, len(given))
        window.begin_texts(given)
        return window

    def note(self, window: KVWindow, first: int) -> None:
        """Record the tokens that a pass has added to the rows of a window, which begins at row `first`."""
        self.lengths[first : first + window.rows] = window.row_lengths or [window.length]
        for row in range(first, first + window.rows):
            self.starts[row] = window.start + window.length - self.lengths[row]

    def rewind(self, row: int, length: int) -> None:
        """Keep only the first `length` tokens of a row, and move them to the row's beginning. The memory after them is
        released."""
        assert 0 <= length <= self.lengths[row]
        self.lengths[row] = length
        self._move(row, 0)
        self.whole.give_back(row, length)

    def forget(self, row: int, length: int) -> None:
        """Keep only the first `length` tokens of a row, without moving them."""
        assert 0 <= length <= self.lengths[row]
        self.lengths[row] = length

    def copy(self, source: int, row: int, length: int) -> None:
        """Replace a row's text by the first `length` tokens of row `source`."""
        begin = self.starts[source]
        self.whole.back(row, 1, length)
        for tensor in self._storages():
            tensor[row, :, :length] = tensor[source, :, begin : begin + length]
        self.starts[row], self.lengths[row] = 0, length

    def exchange(self, a: int, b: int) -> None:
        """Swap the texts of two rows."""
        if a == b:
            return
        end = max(self.starts[row] + self.lengths[row] for row in (a, b))
        begin = min(self.starts[row] for row in (a, b))
        for row in (a, b):
            self.whole.back(row, 1, end)
        for tensor in self._storages():
            saved = tensor[a, :, begin:end].clone()
            tensor[a, :, begin:end] = tensor[b, :, begin:end]
            tensor[b, :, begin:end] = saved
        self._windows.clear()  # a draft model that follows a text by its window must not continue with another text
        self.starts[a], self.starts[b] = self.starts[b], self.starts[a]
        self.lengths[a], self.lengths[b] = self.lengths[b], self.lengths[a]

    def align(self, rows: range) -> None:
        """Move the texts of these rows so that they end at the same index. This index is the end of the first row's
        text, or later if the longest text does not fit before it."""
        end = max(self.starts[rows[0]] + self.lengths[rows[0]], *(self.lengths[row] for row in rows))
        for row in rows:
            self._move(row, end - self.lengths[row])

    def _move_to_front(self, rows: range) -> None:
        longest = max(self.lengths[row] for row in rows)
        for row in rows:
            self._move(row, longest - self.lengths[row])

    def _move(self, row: int, start: int) -> None:
        old, length = self.starts[row], self.lengths[row]
        self.starts[row] = start
        if old == start or not length:
            return
        self.whole.back(row, 1, start + length)
        for tensor in self._storages():
            tensor[row, :, start : start + length] = tensor[row, :, old : old + length].clone()

    def _storages(self) -> list[torch.Tensor]:
        return [tensor for layer in self.whole.layers for tensor in layer._store or ()]
