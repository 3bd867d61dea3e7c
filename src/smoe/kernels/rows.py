"""Passes over a few rows at once, as arguments of machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

MOST_ROWS = 4
"""The largest number of rows with which a matrix is multiplied at once."""


def passes(pairs: Sequence[tuple[int, int]]) -> list[Pairs]:
    """Return (x, out) pairs divided into passes of at most `MOST_ROWS`. If the last pass would have a single pair, the
    pair is repeated."""
    parts = [pairs[begin : begin + MOST_ROWS] for begin in range(0, len(pairs), MOST_ROWS)]
    return [Pairs(part if len(part) > 1 else [*part, *part]) for part in parts]


class Pairs:
    """The addresses of rows and of their products, in memory for machine code. This object must outlive the
    computation.

    The last of three rows is repeated, because four rows at once are faster than two and one.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        pairs = [*pairs, pairs[-1]] if len(pairs) == 3 else pairs
        self.count = len(pairs)
        self._words = (ctypes.c_int64 * (2 * len(pairs)))(*(address for pair in pairs for address in pair))
        self.address = ctypes.addressof(self._words)
