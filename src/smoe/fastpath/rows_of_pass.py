"""Describes a pass over tokens of several texts that differ in length.

Each row attends only to its own keys, as if it were alone (`attention.py`). Our kernels can also give each row the bits
that it has alone. For bf16 weights in torch's order this costs nothing. Otherwise rows are computed one after the
other, which takes as long as separate passes, so this is done only if reproducible results are requested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from smoe.kernels.quantised_work import MOST_QUANTISED_ROWS
from smoe.kernels.spinning_pool import SpinningPool


class RowsOfPass:
    """The texts in the running pass: the number of keys of each row, and whether rows must be computed separately."""

    def __init__(self, pool: SpinningPool | None, is_quantised: bool, is_reproducible: bool) -> None:
        """`pool`: the threads of our kernels, or None. `is_quantised`: whether the experts are quantized.
        `is_reproducible`: whether each row must have the same bits as if it were computed alone, even if that takes
        longer."""
        self.keys: Sequence[int] | None = None
        """The number of keys of every row; None if the rows do not have separate texts."""
        is_free = pool is not None and pool.own_order is None and not is_quantised
        self._pool = pool if pool is not None and pool.several and (is_free or is_reproducible) else None

    @contextmanager
    def apart(self, keys: Sequence[int], tokens: int) -> Iterator[bool]:
        """Treat the rows as separate texts during the `with` block. Each row computes up to `tokens` tokens, and then
        has the number of keys that its entry in `keys` gives.

        Yield whether each row gets the same bits as if it were computed alone, on one thread.
        """
        pool = self._pool if tokens == 1 and len(keys) <= MOST_QUANTISED_ROWS else None
        self.keys = keys
        try:
            with nullcontext() if pool is None else pool.summing_rows_alone():
                yield pool is not None
        finally:
            self.keys = None
