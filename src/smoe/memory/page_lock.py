"""Locking a host arena's pages in RAM, so that the device can copy them by itself.

Pages are backed first, on several threads: the driver would do it on one, silently, and fresh memory comes at less than
1 GB/s and thread on some machines. What the driver refuses stays usable, only slower to copy.
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
"""Locked in one call, in whole slots: a copy must not begin in one piece and end in another."""
_MOST_THREADS = 16
_log = logging.getLogger(__name__)


class PageRegistry(Protocol):
    """The driver, as far as it locks pages."""

    def register(self, address: int, nbytes: int) -> int:
        """Lock pages: 0, or the driver's error."""

    def unregister(self, address: int) -> None:
        """Unlock what was locked at this address."""

    def forget_error(self) -> None:
        """The driver's last error has been dealt with."""


class CudaRegistry:
    """The CUDA runtime's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def forget_error(self) -> None:
        """The runtime stores an error until it is read; torch asks after each launch, and would blame that one."""
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


def lock_pages(arena: Arena, registry: PageRegistry, threads: int) -> list[int]:
    """Back, on so many threads, and lock the arena, piece by piece; the addresses of what was locked, to be unlocked
    again.

    Ends with a warning at the first piece that is refused.
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
    """Whole slots together, of about `_PIECE_BYTES`: a copy must not cross from one locked piece into the next."""
    first = 0
    for begin, end in pairwise(arena.begins):
        if end - first > _PIECE_BYTES and begin > first:
            yield first, begin
            first = begin
    yield first, arena.nbytes
