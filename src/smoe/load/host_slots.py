"""How many experts host memory is to hold, and whether they are read past the page cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smoe.compute.experts_alone import LEAST_SLOTS
from smoe.config import EngineConfig
from smoe.errors import BudgetError
from smoe.expert import ExpertKey
from smoe.policy.budget import SlotClass
from smoe.units import format_bytes


def host_sizes(classes: Sequence[SlotClass], budget: int, least: int) -> list[tuple[int, int]]:
    """(slots, bytes of each) of the host tier by class: all experts, or as large a part of each class, but `least`."""
    whole = sum(each.experts * each.slot_bytes for each in classes)
    return [(min(each.experts, max(least, budget * each.experts // whole)), each.slot_bytes) for each in classes]


def size_of(classes: Sequence[SlotClass]) -> Callable[[ExpertKey], int]:
    """The number of a copy's size class."""
    found = {(layer, each.form): n for n, each in enumerate(classes) for layer in each.layers}
    return lambda key: found[key[0], key[2]]


def reads_directly(config: EngineConfig, total_bytes: int, spare_bytes: float) -> bool:
    """Past the page cache, unless RAM, our own use deducted, holds every expert."""
    if config.direct_io == "auto":
        return spare_bytes < total_bytes * 1.1
    return config.direct_io == "on"


def worker_sizes(classes: Sequence[SlotClass], memory_bytes: int | None, slots: int | None) -> list[tuple[int, int]]:
    """(slots, bytes of each) of a worker by class: as many as the memory holds, or `slots` of every size (one of the
    two is None). Raises `BudgetError` where the memory holds fewer than it takes to read one while another is
    computed."""
    least = sum(number * each for number, each in host_sizes(classes, 0, LEAST_SLOTS))
    if memory_bytes is not None and memory_bytes < least:
        raise BudgetError(
            f"a worker of this model needs {format_bytes(least)} for experts at least, {format_bytes(memory_bytes)} "
            "were given; give it more, or room for a single one (`slots` 1)",
            setting="worker_memory",
            given=memory_bytes,
            allowed=f"at least {least} bytes",
        )
    return host_sizes(classes, memory_bytes or 0, LEAST_SLOTS if slots is None else slots)
