"""Moves one expert to its slot: from disk on a CPU, or through the host tier on a device with its own memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from smoe.expert import EXACT, ExpertKey
from smoe.memory.arena import Arena
from smoe.memory.expert_files import DiskReader
from smoe.memory.host import HostTier
from smoe.memory.reading_threads import Ticket
from smoe.memory.store import ExpertStore, SlotLayout, StoredRun

if TYPE_CHECKING:
    import torch

    from smoe.memory.link import Link


Arrange = Callable[[ExpertKey, SlotLayout, memoryview], None]
_MOST = 0.75
"""The fraction of a file from which on most of it is in the page cache."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a dtype's name in safetensors files."""
    from smoe.memory.torch_dtypes import TORCH

    return TORCH[name]


class Filler:
    """Reads an expert from disk into a buffer with the layout of its slot. If the file's layout differs, the bytes go
    through a staging buffer.

    There may be more staging buffers than threads, because a thread also executes demand loads between two chunks of a
    prefetch. When an expert is read for the first time, its weights are checked for NaN and infinity, which a router
    would hide.
    """

    def __init__(self, stores: Mapping[int, ExpertStore], reader: DiskReader, arrange: Arrange | None = None) -> None:
        """`stores`: the expert stores, by format (EXACT, LOW). `arrange` is called with every expert that was read, and
        may change its layout in the buffer; None: the layout stays that of the file."""
        self._stores = stores
        self._arrange = arrange
        self._reader = reader
        self._idle: deque[Arena] = deque()
        self._seen: set[ExpertKey] = set()
        self._staging_bytes = max(store.staging_buffer_bytes for store in stores.values())
        reader.expect({path: identity for store in stores.values() for path, identity in store.identities().items()})

    @property
    def cached_bytes(self) -> int:
        """The number of bytes that were copied from the page cache although reads are direct."""
        return self._reader.cached_bytes

    def is_cached(self) -> bool:
        """Return whether most of each file of full-precision experts is in the page cache."""
        return self._reader.cached_share(self._stores[EXACT].paths()) >= _MOST

    def fill(self, key: ExpertKey, buffer: memoryview, between: Callable[[], None] | None, is_kept: bool = True) -> int:
        """Read an expert into the buffer, and return the number of bytes read from disk. `between` is called between
        two chunks. `is_kept`: as for `DiskReader.read`.

        Raises `TransferError` or `CheckpointError`; the buffer's contents are then undefined.
        """
        layer, expert, form = key
        store = self._stores[form]
        placement = store.placement(layer, expert)
        came = self._read(placement, buffer, between, is_kept)
        if placement.pieces:
            staging = self._staging()
            try:
                came += self._assemble(placement, store.dtype, staging, buffer, between, is_kept)
            finally:
                self._idle.append(staging)
        if key not in self._seen:
            store.check_finite(layer, expert, placement, buffer)
            self._seen.add(key)
        if self._arrange is not None:
            self._arrange(key, placement, buffer)
        return came

    def _read(
        self, placement: SlotLayout, buffer: memoryview, between: Callable[[], None] | None, is_kept: bool
    ) -> int:
        came = 0
        for read in placement.reads:
            if came and between is not None:
                between()
            came += self._reader.read(read, buffer[read.target : read.target + read.nbytes], between, is_kept)
        return came

    def _assemble(
        self,
        placement: SlotLayout,
        dtype: str,
        staging: Arena,
        buffer: memoryview,
        between: Callable[[], None] | None,
        is_kept: bool,
    ) -> int:
        """Read an expert chunk by chunk, and copy or convert each chunk to its offset in the slot. Return the bytes
        read from disk."""
        came = 0
        for piece in placement.pieces:
            if (came or placement.reads) and between is not None:
                between()
            came += self._reader.read(piece.read, staging.buffer(0), None, is_kept)
            if piece.arrangement is not None:
                stored = np.frombuffer(staging.buffer(0), np.uint8, piece.nbytes, piece.source)
                piece.arrangement.put(stored, buffer, piece.target, piece.begin)
                continue
            if piece.dtype == dtype:
                source = np.frombuffer(staging.buffer(0), np.uint8, piece.nbytes, piece.source)
                np.frombuffer(buffer, np.uint8, piece.nbytes, piece.target)[:] = source
            else:
                _convert(piece, dtype, staging, buffer)
        return came

    def _staging(self) -> Arena:
        try:
            return self._idle.pop()
        except IndexError:
            return Arena([(1, self._staging_bytes)], huge_pages=True)


def _convert(piece: StoredRun, dtype: str, staging: Arena, slot: memoryview) -> None:
    """Convert the elements of a chunk to the dtype of the slot, and write them into the slot."""
    import torch

    target_dtype = torch_dtype(dtype)
    source = _elements_at(staging, piece.source, piece.nbytes, torch_dtype(piece.dtype))
    length = source.numel() * target_dtype.itemsize
    target = torch.frombuffer(slot, dtype=torch.uint8)[piece.target : piece.target + length]
    target.view(target_dtype).copy_(source)


def _elements_at(staging: Arena, begin: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return elements of a staging buffer, from the offset `begin` on. They are copied if they are not aligned for
    their dtype."""
    if begin % dtype.itemsize == 0:
        return staging.view(0, begin, (nbytes // dtype.itemsize,), dtype)
    return staging.tensor(0)[begin : begin + nbytes].clone().view(dtype)


class SlotMover:
    """Moves experts from disk to slots on a CPU."""

    def __init__(self, filler: Filler, reader: DiskReader, arena: Arena) -> None:
        self._filler = filler
        self._reader = reader
        self._buffers = [arena.buffer(slot) for slot in range(arena.slots)]

    def move(self, ticket: Ticket, between: Callable[[], None] | None) -> int:
        load = ticket.load
        return self._filler.fill(load.key, self._buffers[load.slot], between, load.keep)

    def mark_free(self) -> Any:
        return None

    def close(self) -> None:
        self._buffers.clear()  # they would keep the arena's memory
        self._reader.close()


class HostMover:
    """Moves experts to slots of a device with its own memory: from disk to the host tier, if they are not there, and
    then over a link."""

    def __init__(self, filler: Filler, reader: DiskReader, host: HostTier, arena: Arena, link: Link) -> None:
        self._filler = filler
        self._reader = reader
        self._host = host
        self._arena = arena
        self._link = link

    def move(self, ticket: Ticket, between: Callable[[], None] | None) -> int:
        came = 0
        lease = self._host.lease(ticket.load.key)
        try:
            if not lease.is_hit:
                came = self._filler.fill(ticket.load.key, self._host.arena.buffer(lease.slot), between)
                self._host.note_filled(lease)
            source, target = self._host.arena.tensor(lease.slot), self._arena.tensor(ticket.load.slot)
            self._link.copy(source, target, ticket, between)
        finally:
            self._host.give_back(lease)
        return came

    def mark_free(self) -> Any:
        return self._link.mark_free()

    def close(self) -> None:
        self._link.close()
        self._reader.close()
        self._host.close()
