"""Chooses the number of experts in host memory, and whether they are read past the page cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smoe.compute.experts_alone import LEAST_SLOTS
from smoe.config import EngineConfig
from smoe.errors import BudgetError
from smoe.expert import ExpertKey
from smoe.policy.budget import SlotClass
from smoe.units import format_bytes


def host_sizes(classes: Sequence[SlotClass], budget: int, least: int) -> list[tuple[int, int]]:
    """Return the slots of the host tier: (number of slots, bytes per slot) for each slot class. The slots use `budget`
    bytes. They hold all experts, or the same fraction of every class, but at least `least` slots of each."""
    whole = sum(each.experts * each.slot_bytes for each in classes)
    return [(min(each.experts, max(least, budget * each.experts // whole)), each.slot_bytes) for each in classes]


def size_of(classes: Sequence[SlotClass]) -> Callable[[ExpertKey], int]:
    """Return a function that takes the key of an expert copy, (layer, expert, format), and returns the index of its
    slot class in `classes`."""
    found = {(layer, each.form): n for n, each in enumerate(classes) for layer in each.layers}
    return lambda key: found[key[0], key[2]]


def reads_directly(config: EngineConfig, total_bytes: int, spare_bytes: float) -> bool:
    """Return whether experts are read past the page cache. With the setting `auto` they are, unless the free RAM could
    cache every expert."""
    if config.direct_io == "auto":
        return spare_bytes < total_bytes * 1.1
    return config.direct_io == "on"


def worker_sizes(classes: Sequence[SlotClass], memory_bytes: int | None, slots: int | None) -> list[tuple[int, int]]:
    """Return the slots of a worker: (number of slots, bytes per slot) for each slot class. The number of slots is as
    many as `memory_bytes` can hold, or `slots` of every size.

    Either `memory_bytes` or `slots` is None. Raises `BudgetError` if the memory cannot hold two experts: one that is
    read and one that is computed.
    """
    least = sum(number * each for number, each in host_sizes(classes, 0, LEAST_SLOTS))
    if memory_bytes is not None and memory_bytes < least:
        raise BudgetError(
            f"a worker of this model needs at least {format_bytes(least)} for experts, and "
            f"{format_bytes(memory_bytes)} were given; give more memory, or give room for a single expert (`slots=1`)",
            setting="worker_memory",
            given=memory_bytes,
            allowed=f"at least {least} bytes",
        )
    return host_sizes(classes, memory_bytes or 0, LEAST_SLOTS if slots is None else slots)
