"""Passes of a few rows, as arguments of machine code."""

from __future__ import annotations

import ctypes
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
