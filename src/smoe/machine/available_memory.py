"""Finds how much memory this process may take. This is the available memory, or less if one of these limits is lower:

Linux    the memory limit of a container, or of any other cgroup (`cgroup.py`)
macOS    memory that is free without compressing or swapping that of other programs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import psutil

from smoe.machine.cgroup import cgroup_room
from smoe.machine.device import AnyDevice
from smoe.units import format_bytes

MARGIN_SHARE = 0.10
MIN_MARGIN_BYTES = 256 * 2**20
_GROUP_MARGIN_SHARE = 0.04
_GROUP_MARGIN_BYTES = 48 * 2**20


class Room(NamedTuple):
    """The memory in bytes that a limit still allows, the name of the limit, and advice how to get more memory."""

    nbytes: int
    source: str
    advice: str


def free_device_bytes(device: AnyDevice) -> tuple[int, str]:
    """Return the free memory of the computing device in bytes, and a text that says where the number comes from."""
    if device.type == "cuda":
        import torch

        assert isinstance(device, torch.device), "torch is what has found it"
        free, _ = torch.cuda.mem_get_info(device)
        return int(free), f"free memory of {torch.cuda.get_device_name(device)}"
    return free_host_bytes()


def free_host_bytes() -> tuple[int, str]:
    """Return the free memory of the host in bytes, and a text that says where the number comes from."""
    least = least_room()
    return least.nbytes, least.source


def least_room() -> Room:
    """Return the limit that leaves this process the least memory on the host."""
    return min(_rooms(), key=lambda room: room.nbytes)  # the first one of equals


def container_bytes() -> int | None:
    """Return the bytes that this whole process may take in a container; None if memory is not limited.

    The number is the sum of the memory that the process has now and the memory that the limit leaves, less a margin.
    The margin is for memory that the kernel counts in the container's cgroup, and for pages of files.
    """
    room = cgroup_room() if sys.platform == "linux" else None
    if room is None:
        return None
    return int(psutil.Process().memory_info().rss) + room - max(_GROUP_MARGIN_BYTES, int(room * _GROUP_MARGIN_SHARE))


def _rooms() -> Iterator[Room]:
    available = int(psutil.virtual_memory().available)
    yield Room(available, "available RAM", "close other programs")
    if sys.platform == "darwin":
        from smoe.machine.macos_memory import free_bytes

        free = free_bytes()
        if free is not None:
            yield Room(free, "available RAM without other programs' idle memory", "close other programs")
    else:
        room = cgroup_room()
        if room is not None:
            yield Room(room, "room under the memory limit of this container", "raise the container's limit")


def less_margin(free_bytes: int) -> int:
    """Return how much of the free memory smoe takes by default: all of it except a margin for other
    programs."""
    return max(0, free_bytes - max(MIN_MARGIN_BYTES, int(free_bytes * MARGIN_SHARE)))


def shortage(what: str, asked_bytes: int, device: AnyDevice | None = None, used_bytes: int | None = None) -> str | None:
    """Return a message if `what` asks for more memory of the host (or of a GPU) than is free; None if there is enough.
    `used_bytes`: the part of `asked_bytes` that will be used, if it is known."""
    if device is None or device.type == "cpu":
        left, source, advice = least_room()
    else:
        (left, source), advice = free_device_bytes(device), "close other programs"
    if asked_bytes <= left:
        return None
    excess = f"{what} of {format_bytes(asked_bytes)} is above the {format_bytes(left)} that are free ({source})"
    if used_bytes is not None and used_bytes <= left:
        return f"{excess}; the model uses only {format_bytes(used_bytes)} of it"
    return f"{excess}: the system may stop the process; give less, or {advice}"
