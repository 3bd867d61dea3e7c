"""A pass over tokens of several texts, which have lengths of their own.

Each row attends to its own keys as if it were alone (`attention.py`). Our kernels can also give each row the bits that
it has alone: of bf16 weights in the library's order of sums at no cost, else one row after the other, which takes as
long as computing them in turn. So there only those who ask for reproducible results have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from smoe.kernels.quantised_work import MOST_QUANTISED_ROWS
from smoe.kernels.spinning_pool import SpinningPool


class RowsOfPass:
    """What attention and our kernels know of the rows of the pass under way."""

    def __init__(self, pool: SpinningPool | None, is_quantised: bool, is_reproducible: bool) -> None:
        """`pool`: what multiplies, where it is ours; `is_quantised`: the experts are."""
        self.keys: Sequence[int] | None = None
        """Of every row; None where rows have no texts of their own."""
        is_free = pool is not None and pool.own_order is None and not is_quantised
        self._pool = pool if pool is not None and pool.several and (is_free or is_reproducible) else None

    @contextmanager
    def apart(self, keys: Sequence[int], tokens: int) -> Iterator[bool]:
        """Inside, up to `tokens` tokens of every row are computed, which has so many `keys` then; says whether each
        gets the bits that it has alone, on one thread."""
        pool = self._pool if tokens == 1 and len(keys) <= MOST_QUANTISED_ROWS else None
        self.keys = keys
        if pool is not None:
            pool.rows_are_alone = True
        try:
            yield pool is not None
        finally:
            self.keys = None
            if pool is not None:
                pool.rows_are_alone = False
