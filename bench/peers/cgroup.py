"""A memory limit from outside: one cgroup per run, version 1 or 2, which counts the page cache too.

The group is made below the harness's own one where that is allowed:

    v1   <memory mount>/<own group>/smoe-bench-N      memory.limit_in_bytes, memory.max_usage_in_bytes
    v2   <mount>/<nearest group that may>/smoe-bench-N    memory.max, memory.peak

Version 2 hands the memory controller only to children of a group that itself holds no process (the root excepted). If
the harness is alone in its group (`systemd-run --scope -p Delegate=yes ...` gives it one) it moves itself one level
down, to `smoe-bench-harness`, and may then limit its children; else it looks further up the tree.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

PREFIX = "smoe-bench"
_numbers = count()


class CgroupError(RuntimeError):
    """No memory cgroup can be made here; the message says what was tried and what would help."""


@dataclass(frozen=True)
class MemoryParent:
    """A group under which limited groups can be made."""

    version: int
    """1 or 2: decides the names of the files."""
    path: Path
    """Directory of the group."""


class MemoryCgroup:
    """A memory limit for one process; context manager, removes the group at the end.

    A process joins by writing its id to `procs`, before it allocates anything.
    """

    FILES = {
        1: {"limit": "memory.limit_in_bytes", "peak": "memory.max_usage_in_bytes", "failures": "memory.failcnt"},
        2: {"limit": "memory.max", "peak": "memory.peak", "failures": "memory.events"},
    }

    def __init__(self, parent: MemoryParent, limit_bytes: int | None) -> None:
        self._files = self.FILES[parent.version]
        self._version = parent.version
        self.path = parent.path / f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()
        if limit_bytes is not None:
            self._write("limit", str(limit_bytes))
            self._forbid_swap(limit_bytes)

    @property
    def procs(self) -> Path:
        """The file a process writes its id to."""
        return self.path / "cgroup.procs"

    def peak_bytes(self) -> int | None:
        """Highest memory use, page cache included; None on kernels before 5.19 (version 2)."""
        path = self.path / self._files["peak"]
        return int(path.read_text()) if path.exists() else None

    def close(self) -> None:
        """Remove the group. Page cache charged to a v1 group is dropped first."""
        for _ in range(20):
            try:
                if self._version == 1 and (self.path / "memory.force_empty").exists():
                    (self.path / "memory.force_empty").write_text("0")
                self.path.rmdir()
                return
            except OSError:  # a killed process is still being taken apart
                time.sleep(0.1)
        raise RuntimeError(f"could not remove the memory group {self.path}: is a process left in it?")

    def __enter__(self) -> MemoryCgroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, name: str, value: str) -> None:
        (self.path / self._files[name]).write_text(value)

    def _forbid_swap(self, limit_bytes: int) -> None:
        """Count swap into the limit, where the kernel accounts for it."""
        name, value = ("memory.swap.max", "0") if self._version == 2 else ("memory.memsw.limit_in_bytes", limit_bytes)
        if (self.path / name).exists():
            (self.path / name).write_text(str(value))


def find_parent(proc: Path = Path("/proc/self"), root: Path = Path("/")) -> MemoryParent:
    """The group under which limited groups can be made, or CgroupError.

    `proc` and `root` exist for tests: the process directory read and the directory all mount points are below.
    """
    mounts = _memory_mounts((proc / "mountinfo").read_text())
    groups = _own_groups((proc / "cgroup").read_text())
    tried: list[str] = []
    for version, mount_root, mount_point in mounts:
        if version not in groups:
            continue
        base = root / mount_point.lstrip("/")
        own = base / _relative(groups[version], mount_root)
        usable = _usable_v1(own) if version == 1 else _usable_v2(own, base)
        if usable is not None:
            return MemoryParent(version, usable)
        tried.append(f"v{version}: {own}")
    raise CgroupError(
        "no writable memory cgroup"
        + (f" (tried {'; '.join(tried)})" if tried else " (none is mounted)")
        + ". Run as root, or inside `systemd-run --user --scope -p Delegate=yes`."
    )


def _memory_mounts(mountinfo: str) -> list[tuple[int, str, str]]:
    """(version, root of the mount inside the hierarchy, mount point) of cgroup mounts, version 1 memory first."""
    mounts: list[tuple[int, str, str]] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount_root, mount_point = before.split()[3:5]
        file_system, _, super_options = after.split()[:3]
        if file_system == "cgroup" and "memory" in super_options.split(","):
            mounts.append((1, mount_root, mount_point))
        elif file_system == "cgroup2":
            mounts.append((2, mount_root, mount_point))
    return sorted(mounts)


def _own_groups(cgroup: str) -> dict[int, str]:
    """Own group by version, from /proc/self/cgroup lines `id:controllers:path`."""
    groups: dict[int, str] = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            groups[2] = path
        elif "memory" in controllers.split(","):
            groups[1] = path
    return groups


def _relative(group: str, mount_root: str) -> str:
    """Path of `group` below a mount that shows the hierarchy from `mount_root` on (containers mount a part of it)."""
    if group == mount_root or group.startswith(mount_root.rstrip("/") + "/"):
        group = group[len(mount_root.rstrip("/")) :]
    return group.strip("/")


def _usable_v1(own: Path) -> Path | None:
    return own if own.is_dir() and os.access(own, os.W_OK) else None


def _usable_v2(own: Path, base: Path) -> Path | None:
    """The nearest of `own` and the groups above it whose children may have a memory limit."""
    groups = [own, *(parent for parent in own.parents if parent == base or base in parent.parents)]
    for group in groups:
        if not group.is_dir() or not os.access(group, os.W_OK) or "memory" not in _words(group / "cgroup.controllers"):
            continue
        if "memory" in _words(group / "cgroup.subtree_control") or _enable_memory(group, alone=group == own):
            return group
    return None


def _enable_memory(group: Path, alone: bool) -> bool:
    """Hand the memory controller to the children of `group`, moving this process one level down if it is in the way."""
    try:
        if alone and _words(group / "cgroup.procs") == [str(os.getpid())]:
            leaf = group / f"{PREFIX}-harness"
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(str(os.getpid()))
        (group / "cgroup.subtree_control").write_text("+memory")
    except OSError:  # busy (holds processes) or not permitted: the caller looks further up
        return False
    return "memory" in _words(group / "cgroup.subtree_control")


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
