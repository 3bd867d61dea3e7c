"""Rows of activations as machine code is handed them: lists of addresses."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Sequence

MOST_ROWS = 4
"""Rows that are multiplied by one matrix at once."""


def passes(pairs: Sequence[tuple[int, int]]) -> list[Pairs]:
    """What a quantised matrix is multiplied with, `MOST_ROWS` at a time; a last one that is alone comes twice."""
    parts = [pairs[begin : begin + MOST_ROWS] for begin in range(0, len(pairs), MOST_ROWS)]
    return [Pairs(part if len(part) > 1 else [*part, *part]) for part in parts]


class Pairs:
    """Addresses of rows and of where their products go, for machine code; they must outlive the work.

    The last of three comes twice: four at once take less time than two and one.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        pairs = [*pairs, pairs[-1]] if len(pairs) == 3 else pairs
        self.count = len(pairs)
        self._words = (ctypes.c_int64 * (2 * len(pairs)))(*(address for pair in pairs for address in pair))
        self.address = ctypes.addressof(self._words)


class RowLists:
    """Room for lists of rows in 8 bits, for machine code: how many rows, then for each its address and that of its
    product. What is written there stays until `begin` is called for the next work."""

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * 0)()
        self._address = self._used = 0

    def begin(self, words: int) -> None:
        """Room for so many words; earlier lists may be written over."""
        if len(self._words) < words:
            self._words = (ctypes.c_int64 * words)()
            self._address = ctypes.addressof(self._words)
        self._used = 0

    def add(self, pairs: Sequence[tuple[int, int]]) -> int:
        """The address of one more list, which takes 1 + 2 * rows words."""
        place, count = self._used, 1 + 2 * len(pairs)
        self._used += count
        struct.pack_into(f"{count}q", self._words, 8 * place, len(pairs), *itertools.chain.from_iterable(pairs))
        return self._address + 8 * place
