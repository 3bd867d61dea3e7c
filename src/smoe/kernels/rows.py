"""Rows of activations as machine code is handed them: lists of addresses."""

from __future__ import annotations

import ctypes
import itertools
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


class RowList:
    """Addresses of rows in 8 bits and of where their products go, for machine code; they must outlive the work."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._words = (ctypes.c_int64 * (1 + 2 * len(pairs)))(len(pairs), *itertools.chain.from_iterable(pairs))
        self.address = ctypes.addressof(self._words)
