"""What a program can observe, and do, while a model is loaded: phases, and the bytes that have been read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smoe.policy.budget import Ledger

OnBytes = Callable[[int, int], None]
"""A function (bytes read, total bytes) that receives progress. Both numbers are equal at the end."""
_log = logging.getLogger("smoe.load.pretrained")


class LoadObserver:
    """Its methods are called while a model is loaded, in the order of this class. Here they do nothing; a subclass
    overrides those that it needs."""

    def examined(self) -> None:
        """The model is supported, and the budget is not divided yet. What this method allocates counts as memory of the
        libraries."""

    def short_of_memory(self, message: str) -> None:
        """More memory was requested than is free."""
        _log.warning(message)

    def pack_bytes(self, done: int, total: int) -> None:
        """`done` of `total` bytes of a packed file have been compared with its checksums, once per machine."""

    def divided(self, ledger: Ledger) -> None:
        """The budget is divided, and nothing large has been read."""

    def weight_bytes(self, done: int, total: int) -> None:
        """`done` of `total` bytes of the non-expert weights have been read."""

    def host_tier(self, nbytes: int) -> None:
        """So many bytes of host memory will be locked for a GPU."""


class WeightBytes:
    """Counts the bytes that have been read of `total`, and passes both numbers to a function after each weight."""

    def __init__(self, total: int, on_bytes: OnBytes) -> None:
        self._total, self._on_bytes = total, on_bytes
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_bytes(self._done, self._total)
