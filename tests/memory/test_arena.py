"""The arena's memory: that of this process alone, and asked to be in huge pages.

Would catch: memory that could be shared with others, as Python maps it by default, which has no huge pages on most
systems: reads past the page cache then come at a third of their rate.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from smoe.memory.arena import GIVES_BACK, Arena
from smoe.memory.store import PAGE

MIB = 2**20
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> set[str]:
    """What the system says of the mapping that holds an address (`VmFlags` of proc(5))."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = line.split(" ", 1)[0]
        if "-" in span and not line.startswith(("VmFlags", "Size")):
            begin, end = (int(part, 16) for part in span.split("-"))
            holds = begin <= address < end
        elif holds and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no mapping holds it")


@pytest.mark.skipif(sys.platform != "linux" or not _HUGE.exists(), reason="huge pages on request are Linux's")
def test_slots_lie_in_private_memory_that_asks_for_huge_pages() -> None:
    arena = Arena([(4, 8 * MIB)], torch.device("cpu"), huge_pages=True)
    try:
        arena.touch()
        arena.wait_touched(None)
        flags = flags_at(arena.bytes.data_ptr())
    finally:
        arena.close()
    assert "sh" not in flags, "shared"
    assert "hg" in flags, "huge pages were not asked for"


def test_every_slot_is_its_own() -> None:
    arena = Arena([(2, MIB), (1, 2 * MIB)], torch.device("cpu"))
    try:
        for slot in range(3):
            buffer = arena.buffer(slot)
            buffer[:] = bytes([slot + 1]) * len(buffer)
        assert (
            [arena.buffer(slot)[0] for slot in range(3)] == [arena.buffer(slot)[-1] for slot in range(3)] == [1, 2, 3]
        )
        assert [len(arena.buffer(slot)) for slot in range(3)] == [MIB, MIB, 2 * MIB]
    finally:
        arena.close()


@pytest.mark.skipif(not GIVES_BACK, reason="only Linux gives memory back in parts")
def test_a_slot_is_given_back_alone() -> None:
    """What was there is gone, its neighbours are as they were, and it can be written to again."""
    arena = Arena([(2, PAGE), (1, 2 * PAGE)])
    arena.bytes.fill_(7)
    arena.give_back(1)
    assert [set(arena.buffer(slot).tolist()) for slot in range(3)] == [{7}, {0}, {7}]
    arena.tensor(1).fill_(5)
    assert set(arena.buffer(1).tolist()) == {5}
