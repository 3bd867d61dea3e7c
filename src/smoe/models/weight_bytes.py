"""Counts the bytes of a model's files that have been read, for programs that show progress."""

from __future__ import annotations

from collections.abc import Callable

OnBytes = Callable[[int, int], None]
"""A function (bytes read, total bytes) that receives progress. Both numbers are equal at the end."""


class WeightBytes:
    """Counts the bytes that have been read of `total`, and passes both numbers to a function after each weight."""

    def __init__(self, total: int, on_bytes: OnBytes) -> None:
        self._total, self._on_bytes = total, on_bytes
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_bytes(self._done, self._total)
