"""A pass over tokens of several texts that differ in length.

Each row attends to its own keys as if it were alone (`attention.py`). Our kernels can also give each row the bits that
it has alone: for bf16 weights in torch's order at no cost, else row by row, which takes as long as computing the rows
in turn. So the latter is only done if reproducible results are requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from smoe.kernels.quantised_work import MOST_QUANTISED_ROWS
from smoe.kernels.spinning_pool import SpinningPool


class RowsOfPass:
    """The rows of the running pass, as attention and our kernels need them."""

    def __init__(self, pool: SpinningPool | None, is_quantised: bool, is_reproducible: bool) -> None:
        """`pool`: our kernels' threads, or None; `is_quantised`: whether the experts are quantized."""
        self.keys: Sequence[int] | None = None
        """The number of keys of every row; None if the rows do not have separate texts."""
        is_free = pool is not None and pool.own_order is None and not is_quantised
        self._pool = pool if pool is not None and pool.several and (is_free or is_reproducible) else None

    @contextmanager
    def apart(self, keys: Sequence[int], tokens: int) -> Iterator[bool]:
        """Compute, within this context, up to `tokens` tokens of every row, which then has `keys` keys.

        Yields whether each row gets the bits that it has alone, on one thread.
        """
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
