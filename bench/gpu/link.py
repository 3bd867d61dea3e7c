"""What the link and the memory under it give: pages backed and locked, copies by size, our own chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from smoe.expert import EXACT
from smoe.machine.processor import usable_cores
from smoe.memory.arena import Arena
from smoe.memory.link import CudaLink
from smoe.memory.page_lock import CudaRegistry, lock_pages
from smoe.memory.reading_threads import Ticket
from smoe.memory.streams import CudaStreams
from smoe.policy.plan import Load, LoadReason

SIZES = tuple(1 << exponent for exponent in range(18, 28))
"""Bytes of one copy: 256 KiB to 128 MiB."""
_OURS = 64 << 20
"""Bytes of one load over our link."""


def link_rates(device: torch.device, nbytes: int) -> dict[str, Any]:
    """Bytes a second of everything, over `nbytes` of host memory; without a GPU, only what is the host's own."""
    figures: dict[str, Any] = {"bytes": nbytes}
    for threads in (1, 16):
        arena = Arena([(1, nbytes)], torch.device("cpu"))
        began = time.perf_counter()
        arena.touch(threads)
        arena.wait_touched(None)
        figures[f"backed_by_{threads}_threads"] = nbytes / (time.perf_counter() - began)
        arena.close()
    if device.type != "cuda":
        return figures | {"skipped": "copies"}
    arena, target = Arena([(1, nbytes)], torch.device("cpu")), torch.empty(nbytes, dtype=torch.uint8, device=device)
    pageable = {size: _rate(device, _copies(arena.bytes, target, size), nbytes) for size in SIZES[-1:]}
    registry, began = CudaRegistry(device), time.perf_counter()
    locked = lock_pages(arena, registry, usable_cores())
    figures["locked"] = nbytes / (time.perf_counter() - began)
    figures["pieces_locked"] = len(locked)
    figures["pageable_by_size"] = pageable
    figures["pinned_by_size"] = {
        size: _rate(device, _copies(arena.bytes, target, size), nbytes) for size in SIZES if size <= nbytes
    }
    figures["our_link"] = _our_rates(device, arena.bytes, target)
    for address in locked:
        registry.unregister(address)
    return figures


def _our_rates(device: torch.device, source: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """Through `CudaLink`: demand loads are enqueued whole, prefetches a few chunks at a time, of several sizes."""
    found: dict[str, float] = {}
    for chunk in (1 << 20, 1 << 21, 1 << 22, 1 << 23):
        for reason in (LoadReason.DEMAND, LoadReason.PREFETCH):
            link = CudaLink(CudaStreams(device), chunk)
            copies = _copies_by(link, reason, source, target)
            found[f"{reason.value}, chunks of {chunk}"] = _rate(device, copies, source.numel())
            link.close()
    return found


def _copies_by(link: CudaLink, reason: LoadReason, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
    def between() -> None:
        pass

    def run() -> None:
        for begin in range(0, source.numel(), _OURS):
            ticket = Ticket(Load((0, 0, EXACT), 0, None, True, reason, 0), link.mark_free())
            end, asks = begin + _OURS, None if reason is LoadReason.DEMAND else between
            link.copy(source[begin:end], target[begin:end], ticket, asks)

    return run


def _copies(source: torch.Tensor, target: torch.Tensor, size: int) -> Callable[[], None]:
    def run() -> None:
        for begin in range(0, source.numel(), size):
            target[begin : begin + size].copy_(source[begin : begin + size], non_blocking=True)

    return run


def _rate(device: torch.device, work: Callable[[], None], nbytes: int) -> float:
    """Bytes a second of the fastest of three."""
    fastest = float("inf")
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - began)
    return nbytes / fastest
