"""Reads the memory and CPU limits of this process's cgroups, in versions 1 and 2.

    /proc/self/cgroup      the group in each hierarchy          0::/docker/4f  4:memory:/docker/4f
    /proc/self/mountinfo   which part is mounted, and where     / or /docker/4f  at /sys/fs/cgroup/memory

A limit applies to all groups below it, so the limits of the group and of each of its parents are read, up to the mount
point. In a container the group's path is often not visible below the mount point. What is mounted there is then the
group itself or a parent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_SYSTEM = Path("/")
_UNLIMITED_BYTES = 1 << 60
"""In version 1, a number of at least this size means that there is no limit."""
_PERIOD = 100_000
"""The kernel's default period in microseconds."""
_RECLAIMABLE = {
    1: (("total_inactive_file", "inactive_file"), ("total_active_file", "active_file")),
    2: (("inactive_file",), ("active_file",), ("slab_reclaimable",)),
}
"""The entries of memory.stat for pages of files and for kernel caches, which the kernel frees before it refuses memory.
Of each tuple of names, the first that exists is used. Shared memory and locked pages are in other entries."""


class Group(NamedTuple):
    """A cgroup that contains this process: its version, and its folder in the file system."""

    version: int
    folder: Path


class _Mount(NamedTuple):
    """A mounted part of a cgroup hierarchy: which part it is, and its mount point."""

    version: int
    controllers: frozenset[str]
    root: str
    point: Path


def cgroup_room() -> int | None:
    """Return the bytes that the tightest memory limit of this process's cgroups leaves. Pages that the kernel can
    reclaim count as free. Return None without a limit."""
    rooms = [_room(group) for group in groups("memory")]
    return min((room for room in rooms if room is not None), default=None)


def cpu_quota() -> float | None:
    """Return the number of CPUs that the tightest CPU quota of this process's cgroups allows. Return None without a
    quota."""
    quotas = [_quota(group) for group in groups("cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def groups(controller: str) -> Iterator[Group]:
    """Yield every visible cgroup whose limits apply to this process, from all hierarchies. `controller`: `memory` or
    `cpu`."""
    mounts = list(_mounts())
    for line in _lines("cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        fitting = [m for m in mounts if m.version == version and (version == 2 or controller in m.controllers)]
        for mount in _showing(path, fitting or _usual(version, controller, controllers)):
            yield from (Group(version, folder) for folder in _folders(path, mount))


def _room(group: Group) -> int | None:
    """Return the bytes that the memory limit of one cgroup leaves, or None if the cgroup has no limit."""
    names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
    stat = _stat(group.folder / "memory.stat")
    limits = [_number(group.folder / name) for name in names]
    if group.version == 1:
        limits.append(stat.get("hierarchical_memory_limit"))  # includes parents that are not visible
    limit = min((each for each in limits if each is not None and each < _UNLIMITED_BYTES), default=None)
    used = _number(group.folder / ("memory.current" if group.version == 2 else "memory.usage_in_bytes"))
    if limit is None or used is None:
        return None
    found = (next((stat[name] for name in names if name in stat), 0) for names in _RECLAIMABLE[group.version])
    return max(0, limit - max(0, used - sum(found)))


def _quota(group: Group) -> float | None:
    """Return the number of CPUs that the quota of one cgroup allows, or None if the cgroup has no quota."""
    if group.version == 2:
        quota, period = [*_text(group.folder / "cpu.max").split(), "", ""][:2]
    else:
        quota, period = (_text(group.folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    microseconds, of = _whole(quota), _whole(period) or _PERIOD
    return None if microseconds is None or microseconds <= 0 or of <= 0 else microseconds / of


def _mounts() -> Iterator[_Mount]:
    """Yield the mounted cgroup hierarchies. Their lines in mountinfo are like `31 23 0:28 ROOT POINT rw - cgroup cgroup
    rw,memory`."""
    for line in _lines("mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):
            root, point = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), each) for each in fields[3:5])
            version = 2 if kind[0] == "cgroup2" else 1
            yield _Mount(version, frozenset(kind[2].split(",")), root, _SYSTEM / point.lstrip("/"))


def _usual(version: int, controller: str, controllers: str) -> list[_Mount]:
    """Return the conventional mount points of cgroup hierarchies, for a process that cannot see where they are
    mounted."""
    base = _SYSTEM / "sys/fs/cgroup"
    points = (base, base / "unified") if version == 2 else (base / controllers, base / controller)
    return [_Mount(version, frozenset({controller}), "/", point) for point in points if point.is_dir()]


def _showing(path: str, mounts: Iterable[_Mount]) -> list[_Mount]:
    """Return the mounts that contain the cgroup at `path` or one of its parents. If no mount does, return all
    mounts."""
    mounts = list(mounts)
    return [mount for mount in mounts if _below(path, mount.root) is not None] or mounts


def _below(path: str, root: str) -> str | None:
    """Return the path of a cgroup relative to a mounted root, or None if the cgroup is not below this root."""
    root = root.rstrip("/")
    is_below = (path == root or path.startswith(f"{root}/")) and ".." not in path.split("/")
    return path[len(root) :].strip("/") if is_below else None


def _folders(path: str, mount: _Mount) -> Iterator[Path]:
    """Yield the folders of a cgroup and of its parents, up to the mount point, as far as they are visible."""
    below = _below(path, mount.root)
    parts = [part for part in (path if below is None else below).split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        folder = mount.point.joinpath(*parts[:count])
        if folder.is_dir():
            yield folder


def _lines(name: str) -> list[str]:
    return _text(_SYSTEM / "proc/self" / name).splitlines()


def _text(path: Path) -> str:
    """Return the text of a file without surrounding white space, or an empty string if the file is missing."""
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""


def _whole(text: str) -> int | None:
    """Return the integer that a text consists of, or None for `max` and other texts."""
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _number(path: Path) -> int | None:
    return _whole(_text(path))


def _stat(path: Path) -> dict[str, int]:
    """Return the names and numbers in a file that has one pair (name, number) in each line."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
