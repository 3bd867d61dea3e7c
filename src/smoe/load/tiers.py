"""Makes the memory tiers below the device: disk alone, or disk, host tier and link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from smoe.config import EngineConfig
from smoe.load.host_slots import host_sizes, reads_directly, size_of
from smoe.machine.available_memory import free_device_bytes, less_margin
from smoe.machine.processor import reading_threads, usable_cores
from smoe.memory.arena import Arena
from smoe.memory.emulation import Emulation
from smoe.memory.expert_files import DiskReader
from smoe.memory.host import HostTier
from smoe.memory.link import CudaLink, EmulatedLink, Link
from smoe.memory.movers import Filler, HostMover, SlotMover
from smoe.memory.pacing import Pacing
from smoe.memory.page_lock import CudaRegistry
from smoe.memory.reading_threads import Mover
from smoe.memory.store import ExpertStore
from smoe.memory.streams import CudaStreams
from smoe.policy.budget import SlotClass
from smoe.policy.residency import SlotTable


class Tiers(NamedTuple):
    """The memory tiers below the device, and the mover that loads experts through them."""

    mover: Mover
    filler: Filler
    host: HostTier | None = None
    """The host tier; None if slots are in host memory themselves."""
    link: Link | None = None


def make_tiers(
    stores: Mapping[int, ExpertStore],
    arena: Arena,
    table: SlotTable,
    classes: Sequence[SlotClass],
    config: EngineConfig,
    pacing: Pacing,
    on_host_tier: Callable[[int], None] | None,
) -> Tiers:
    """Return the memory tiers: a host tier and a link for a device with its own memory; for a CPU, reads directly into
    slots.

    `stores` is by format; `classes` are the slot classes of the ledger, of all formats. `on_host_tier` is called with
    the bytes of host memory that will be allocated and locked for a GPU.
    """
    free, _ = free_device_bytes(torch.device("cpu"))
    total_bytes = sum(store.total_bytes for store in stores.values())
    if arena.device.type == "cpu" and not pacing.is_emulated:
        reader = DiskReader(reads_directly(config, total_bytes, free - arena.nbytes))
        filler = Filler(stores, reader)
        return Tiers(SlotMover(filler, reader, arena), filler)
    budget = config.host_memory_bytes if config.host_memory_bytes is not None else less_margin(free)
    # two for each reading thread (a demand load within a prefetch), and one for the CPU
    least = 2 * reading_threads(config) + 1
    sizes = host_sizes(classes, budget, least)
    nbytes = sum(slots * each for slots, each in sizes)
    is_direct = reads_directly(config, total_bytes, free - nbytes)
    reader = DiskReader(is_direct)
    filler = Filler(stores, reader)
    registry = None if pacing.is_emulated else CudaRegistry(arena.device)
    if registry is not None and on_host_tier is not None:
        on_host_tier(nbytes)
    host = HostTier(sizes, size_of(classes), lambda key: key in table.ready, registry, is_direct, usable_cores())
    link: Link = EmulatedLink(pacing) if isinstance(pacing, Emulation) else CudaLink(CudaStreams(arena.device))
    return Tiers(HostMover(filler, reader, host, arena, link), filler, host, link)
