"""Lock a host arena's pages in RAM, so that the device can copy them directly.

Pages are allocated first, on several threads, because the driver would use one, and some machines allocate less than 1
GB/s per thread. Memory that the driver refuses to lock remains usable, with slower copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Protocol

import torch

from smoe.memory.arena import Arena
from smoe.units import format_bytes

_PIECE_BYTES = 2**30
"""The number of bytes locked in one call, in whole slots, because a copy must not cross two locked pieces."""
_MOST_THREADS = 16
_log = logging.getLogger(__name__)


class PageRegistry(Protocol):
    """The driver functions for locking pages."""

    def register(self, address: int, nbytes: int) -> int:
        """Lock pages; return 0 or the driver's error number."""

    def unregister(self, address: int) -> None:
        """Unlock the memory that was locked at this address."""

    def forget_error(self) -> None:
        """Clear the driver's last error."""


class CudaRegistry:
    """The CUDA runtime's functions for locking pages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def forget_error(self) -> None:
        """Clear the error that the runtime stores until it is read; torch would attribute it to the next launch."""
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


def lock_pages(arena: Arena, registry: PageRegistry, threads: int) -> list[int]:
    """Allocate (on `threads` threads) and lock the arena, and return the addresses to unlock later.

    Stops with a warning at the first piece that the driver refuses.
    """
    arena.touch(min(_MOST_THREADS, threads))
    arena.wait_touched(None)
    locked: list[int] = []
    for begin, end in _pieces(arena):
        address = arena.bytes.data_ptr() + begin
        error = registry.register(address, end - begin)
        if error:
            registry.forget_error()
            _log.warning(
                "the driver would lock %s of %s of host memory for experts (error %d); the rest is copied to the "
                "device more slowly. Raise the limit of locked memory (ulimit -l on Linux) or lower `host_memory`",
                format_bytes(begin),
                format_bytes(arena.nbytes),
                error,
            )
            break
        locked.append(address)
    return locked


def _pieces(arena: Arena) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole slots of about `_PIECE_BYTES`, because a copy must not cross two locked pieces."""
    first = 0
    for begin, end in pairwise(arena.begins):
        if end - first > _PIECE_BYTES and begin > first:
            yield first, begin
            first = begin
    yield first, arena.nbytes
