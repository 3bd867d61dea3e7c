"""How much memory this process may take: the machine's, or less where a container says so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")
MARGIN_SHARE = 0.10
MIN_MARGIN_BYTES = 256 * 2**20


def free_device_bytes(device: torch.device) -> tuple[int, str]:
    """Free memory of the device that computes, and where the figure comes from."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free), f"free memory of {torch.cuda.get_device_name(device)}"
    return free_host_bytes()


def free_host_bytes() -> tuple[int, str]:
    """The same of the host."""
    available = int(psutil.virtual_memory().available)
    room = cgroup_room()
    if room is not None and room < available:
        return room, "room under the memory limit of this container"
    return available, "available RAM"


def less_margin(free_bytes: int) -> int:
    """What smoe takes of free memory when nobody says: all but a margin for everybody else."""
    return max(0, free_bytes - max(MIN_MARGIN_BYTES, int(free_bytes * MARGIN_SHARE)))


def cgroup_room() -> int | None:
    """Bytes left under the tightest memory limit that applies to this process; None without one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(_CGROUP, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            rooms += _rooms(_CGROUP / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(rooms, default=None)


def _rooms(root: Path, path: str, limit_name: str, usage_name: str) -> list[int]:
    """Room in the group and each of its parents."""
    rooms: list[int] = []
    group = root / path.lstrip("/")
    while True:
        try:
            limit = (group / limit_name).read_text().strip()
            if limit != "max" and int(limit) < 1 << 60:
                rooms.append(int(limit) - int((group / usage_name).read_text()))
        except (OSError, ValueError):
            pass
        if group == root or root not in group.parents:
            return rooms
        group = group.parent
