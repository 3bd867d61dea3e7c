"""Lists of rows' addresses, as arguments of machine code."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Sequence

MOST_ROWS = 4
"""The largest number of rows that one matrix is multiplied with at once."""


def passes(pairs: Sequence[tuple[int, int]]) -> list[Pairs]:
    """Divide (x, out) pairs into passes of at most `MOST_ROWS`; a single one in the last pass is repeated."""
    parts = [pairs[begin : begin + MOST_ROWS] for begin in range(0, len(pairs), MOST_ROWS)]
    return [Pairs(part if len(part) > 1 else [*part, *part]) for part in parts]


class Pairs:
    """Addresses of rows and of their products, for machine code; the object must outlive the computation.

    The last of three rows is repeated, because four at once are faster than two and one.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        pairs = [*pairs, pairs[-1]] if len(pairs) == 3 else pairs
        self.count = len(pairs)
        self._words = (ctypes.c_int64 * (2 * len(pairs)))(*(address for pair in pairs for address in pair))
        self.address = ctypes.addressof(self._words)


class RowLists:
    """Memory for lists of 8-bit rows: the number of rows, then each one's address and that of its product.

    The lists are valid until `begin` is called for the next job.
    """

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * 0)()
        self._address = self._used = 0

    def begin(self, words: int) -> None:
        """Allocate `words` words; earlier lists become invalid."""
        if len(self._words) < words:
            self._words = (ctypes.c_int64 * words)()
            self._address = ctypes.addressof(self._words)
        self._used = 0

    def add(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Store a list, which takes 1 + 2 * rows words, and return its address."""
        place, count = self._used, 1 + 2 * len(pairs)
        self._used += count
        struct.pack_into(f"{count}q", self._words, 8 * place, len(pairs), *itertools.chain.from_iterable(pairs))
        return self._address + 8 * place
