"""Locks the pages of a host arena in RAM, so that the device can copy from them directly.

Pages are allocated first, on several threads. The driver would use one thread, and some machines allocate less than 1
GB/s on one. If the driver refuses to lock some of the memory, it remains usable, with slower copies.
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
"""The number of bytes that are locked in one call. Each call locks whole slots, because a copy must not cross two
locked ranges."""
_MOST_THREADS = 16
_log = logging.getLogger(__name__)


class PageRegistry(Protocol):
    """The functions of a device's driver that lock and unlock pages in RAM."""

    def register(self, address: int, nbytes: int) -> int:
        """Lock the pages of a range of memory. Return 0, or the driver's error number."""

    def unregister(self, address: int) -> None:
        """Unlock the range of memory that was locked at the address `address`."""

    def forget_error(self) -> None:
        """Clear the driver's record of its last error."""


class CudaRegistry:
    """The functions of the CUDA runtime that lock pages in RAM."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def forget_error(self) -> None:
        """Clear the error that the runtime stores until it is read. Otherwise torch would attribute the error to the
        next launch."""
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


def lock_pages(arena: Arena, registry: PageRegistry, threads: int) -> list[int]:
    """Allocate the pages of an arena, on `threads` threads, and lock them. Return the addresses to unlock later.

    If the driver refuses to lock a range, stop there with a warning.
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
                "the GPU's driver locked only %s of %s of host memory for experts (error %d); experts in the other "
                "memory are copied to the device more slowly. Raise the limit of locked memory (ulimit -l on Linux) "
                "or lower `host_memory`",
                format_bytes(begin),
                format_bytes(arena.nbytes),
                error,
            )
            break
        locked.append(address)
    return locked


def _pieces(arena: Arena) -> Iterator[tuple[int, int]]:
    """Yield the arena's memory as ranges of whole slots, each of about `_PIECE_BYTES`."""
    first = 0
    for begin, end in pairwise(arena.begins):
        if end - first > _PIECE_BYTES and begin > first:
            yield first, begin
            first = begin
    yield first, arena.nbytes
