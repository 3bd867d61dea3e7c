"""Limits of cgroups, read from trees of files such as kernels of versions 1 and 2 show them.

Would catch a page cache that counts as used memory, a limit or a quota of a parent that is not read, a container whose
own path is not visible, half a CPU that becomes none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from smoe.config import EngineConfig
from smoe.machine import cgroup, processor
from smoe.machine.available_memory import free_host_bytes, shortage
from smoe.machine.processor import reading_threads, set_compute_threads, usable_cores

MIB, GIB = 2**20, 2**30
UNLIMITED_V1 = 9223372036854771712

Tree = Callable[..., None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """`tree(membership, mounts, files)` lays out /proc/self and the mounted hierarchies below a folder."""
    monkeypatch.setattr(cgroup, "_SYSTEM", tmp_path)
    monkeypatch.setattr(processor, "_schedulable_cores", lambda: 16)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB, total=64 * GIB))

    def lay(membership: str | None, mounts: str | None, files: dict[str, object]) -> None:
        for name, text in (("cgroup", membership), ("mountinfo", mounts)):
            if text is not None:
                put(tmp_path / "proc/self" / name, text)
        for name, text in files.items():
            put(tmp_path / "sys/fs/cgroup" / name, text)

    return lay


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def mounted(version: int, controllers: str = "", root: str = "/", point: str = "") -> str:
    place = f"/sys/fs/cgroup{point}"
    kind = "cgroup2 cgroup2 rw" if version == 2 else f"cgroup cgroup rw,{controllers}"
    return f"35 31 0:32 {root} {place} rw,nosuid shared:9 - {kind}"


def stat(**pages: int) -> str:
    return "\n".join(f"{name} {count}" for name, count in pages.items())


def test_version_2_counts_pages_that_can_be_reclaimed_as_free(tree: Tree) -> None:
    tree("0::/", mounted(2), {
        "memory.max": 2 * GIB,
        "memory.high": "max",
        "memory.current": 2 * GIB - MIB,
        "memory.stat": stat(anon=MIB, inactive_file=1 * GIB, active_file=512 * MIB, slab_reclaimable=64 * MIB, shmem=5),
    })  # fmt: skip
    assert cgroup.cgroup_room() == MIB + 1 * GIB + 512 * MIB + 64 * MIB
    assert free_host_bytes() == (cgroup.cgroup_room(), "room under the memory limit of this container")


def test_version_1_counts_pages_that_can_be_reclaimed_as_free(tree: Tree) -> None:
    tree("4:memory:/docker/4f\n1:name=systemd:/docker/4f", mounted(1, "memory", "/docker/4f", "/memory"), {
        "memory/memory.limit_in_bytes": 2 * GIB,
        "memory/memory.usage_in_bytes": 2 * GIB,
        "memory/memory.stat": stat(
            inactive_file=1, active_file=2, total_inactive_file=1 * GIB, total_active_file=256 * MIB
        ),
    })  # fmt: skip
    assert cgroup.cgroup_room() == 1 * GIB + 256 * MIB


def test_version_1_without_a_hierarchy_has_its_own_pages(tree: Tree) -> None:
    tree("4:memory:/", mounted(1, "memory", "/", "/memory"), {
        "memory/memory.limit_in_bytes": 2 * GIB,
        "memory/memory.usage_in_bytes": 2 * GIB,
        "memory/memory.stat": stat(inactive_file=3 * MIB, active_file=2 * MIB),
    })  # fmt: skip
    assert cgroup.cgroup_room() == 5 * MIB


def test_version_1_states_the_limit_of_a_parent_that_is_not_visible(tree: Tree) -> None:
    tree("4:memory:/pod/c", mounted(1, "memory", "/pod/c", "/memory"), {
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
        "memory/memory.usage_in_bytes": 1 * GIB,
        "memory/memory.stat": stat(hierarchical_memory_limit=3 * GIB),
    })  # fmt: skip
    assert cgroup.cgroup_room() == 2 * GIB


@pytest.mark.parametrize("tight", ["", "pod/", "pod/container/"])
@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_the_tightest_group_of_a_nest_is_what_counts(tree: Tree, tight: str, name: str) -> None:
    files: dict[str, object] = {}
    for level in ("", "pod/", "pod/container/"):
        files |= {f"{level}memory.max": 8 * GIB, f"{level}memory.high": "max", f"{level}memory.current": 1 * GIB}
    files[f"{tight}{name}"] = 2 * GIB
    files[f"{tight}memory.stat"] = stat(inactive_file=512 * MIB)
    tree("0::/pod/container", mounted(2), files)
    assert cgroup.cgroup_room() == 1 * GIB + 512 * MIB


def test_a_group_over_its_limit_has_no_room_and_cache_beyond_use_is_no_gain(tree: Tree) -> None:
    tree("0::/", mounted(2), {"memory.max": 1 * GIB, "memory.current": 2 * GIB})
    assert cgroup.cgroup_room() == 0
    tree("0::/", mounted(2), {"memory.current": 1, "memory.stat": stat(inactive_file=5 * GIB)})
    assert cgroup.cgroup_room() == 1 * GIB, "counted at another moment"


@pytest.mark.parametrize(
    ("membership", "mounts"),
    [
        ("0::/docker/4f", mounted(2)),
        ("0::/docker/4f", mounted(2, root="/other")),
        ("0::/../../docker/4f", mounted(2)),
        ("0::/", mounted(2, root="/../..")),
        ("0::/kubepods/pod1/4f", mounted(2, root="/kubepods/pod1/4f")),
        ("0::/kubepods/pod1/4f", mounted(2, root="/kubepods/pod1")),
        ("0::/docker/4f", None),
        ("0::/docker/4f", ""),
    ],
)
def test_a_path_that_is_not_visible_leaves_what_is_mounted(tree: Tree, membership: str, mounts: str | None) -> None:
    """A container has a mount namespace of its own; its group in /proc/self/cgroup may be that of the host."""
    tree(membership, mounts, {
        "memory.max": 2 * GIB, "memory.current": 1 * GIB, "cpu.max": "150000 100000", "cgroup.procs": 1,
    })  # fmt: skip
    assert cgroup.cgroup_room() == 1 * GIB
    assert cgroup.cpu_quota() == 1.5


def test_a_mount_of_another_group_is_left_alone_where_the_own_one_is_mounted(tree: Tree) -> None:
    mounts = "\n".join([mounted(2, root="/other", point="/bound"), mounted(2)])
    tree("0::/mine", mounts, {
        "bound/memory.max": 1, "bound/memory.current": 0, "mine/memory.max": 9, "mine/memory.current": 1,
    })  # fmt: skip
    assert cgroup.cgroup_room() == 8


def test_mount_points_may_have_spaces(tree: Tree, tmp_path: Path) -> None:
    tree("0::/", mounted(2, point="/a\\040b"), {"a b/memory.max": 5, "a b/memory.current": 1})
    assert cgroup.cgroup_room() == 4


def test_a_hybrid_reads_memory_and_time_where_they_are(tree: Tree) -> None:
    """Version 2 has the processes, version 1 the controllers."""
    mounts = [
        mounted(1, "cpu,cpuacct", point="/cpu,cpuacct"),
        mounted(1, "memory", point="/memory"),
        mounted(2, point="/unified"),
    ]
    tree("5:cpu,cpuacct:/a/b\n4:memory:/a\n0::/a/b", "\n".join(mounts), {
        "unified/a/b/cgroup.procs": 1,
        "memory/a/memory.limit_in_bytes": 3 * GIB,
        "memory/a/memory.usage_in_bytes": 1 * GIB,
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
        "memory/memory.usage_in_bytes": 9 * GIB,
        "cpu,cpuacct/a/b/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/a/b/cpu.cfs_period_us": 100000,
        "cpu,cpuacct/a/cpu.cfs_quota_us": 350000,
        "cpu,cpuacct/a/cpu.cfs_period_us": 100000,
    })  # fmt: skip
    assert cgroup.cgroup_room() == 2 * GIB
    assert cgroup.cpu_quota() == 3.5 and usable_cores() == 3


@pytest.mark.parametrize("mounts", [None, ""])
def test_conventional_places_of_version_1(tree: Tree, mounts: str | None) -> None:
    tree("4:memory:/x\n3:cpuacct,cpu:/x", mounts, {
        "memory/memory.limit_in_bytes": 2, "memory/memory.usage_in_bytes": 1,
        "cpu/x/cpu.cfs_quota_us": 400000, "cpu/x/cpu.cfs_period_us": 200000,
    })  # fmt: skip
    assert cgroup.cgroup_room() == 1 and cgroup.cpu_quota() == 2


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        (None, {}),
        ("", {}),
        ("0::/", {}),
        ("0::/", {"memory.max": "max", "memory.current": 5, "cpu.max": "max 100000"}),
        ("0::/", {"memory.max": 5, "cpu.max": ""}),
        ("0::/", {"memory.max": "", "memory.current": "", "cpu.max": "some text"}),
        ("0::/", {"memory.max": "max", "memory.high": "max", "memory.current": 5, "cpu.max": "0 100000"}),
        ("a line of another kind", {"memory.max": "5"}),
        ("4:memory,cpu:/", {"memory/memory.limit_in_bytes": UNLIMITED_V1, "memory/memory.usage_in_bytes": 5}),
        ("4:memory,cpu:/", {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}),
    ],
)
def test_without_a_limit_there_is_none(tree: Tree, membership: str | None, files: dict[str, object]) -> None:
    tree(membership, None, files)
    assert cgroup.cgroup_room() is None and cgroup.cpu_quota() is None
    assert usable_cores() == 16 and free_host_bytes() == (64 * GIB, "available RAM")


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("50000 100000", 1),
        ("5000 100000", 1),
        ("100000 100000", 1),
        ("199999 100000", 1),
        ("250000 100000", 2),
        ("25000 10000", 2),
        ("200000", 2),
        ("9900000 100000", 16),
        ("max 100000", 16),
    ],
)
def test_whole_cpus_of_a_quota_and_one_at_least(tree: Tree, quota: str, cores: int) -> None:
    tree("0::/", mounted(2), {"cpu.max": quota})
    assert usable_cores() == cores


@pytest.mark.parametrize("tight", ["", "pod/", "pod/container/"])
def test_the_tightest_quota_of_a_nest_is_what_counts(tree: Tree, tight: str) -> None:
    files: dict[str, object] = {f"{level}cpu.max": "max 100000" for level in ("", "pod/", "pod/container/")}
    tree("0::/pod/container", mounted(2), files | {f"{tight}cpu.max": "300000 100000"})
    assert usable_cores() == 3


def test_affinity_and_quota_both_count(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree("0::/", mounted(2), {"cpu.max": "300000 100000"})
    monkeypatch.setattr(processor, "_schedulable_cores", lambda: 2)
    assert usable_cores() == 2


def test_a_thread_that_is_pinned_to_a_core_is_not_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    assert processor._schedulable_cores() == 1
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert processor._schedulable_cores() == 12


@pytest.mark.parametrize(
    ("has", "asked", "quota", "becomes"), [(8, None, 2, 2), (1, None, 2, 1), (8, 5, 2, 5), (8, None, 12, 8)]
)
def test_torch_computes_on_no_more_threads_than_a_quota_pays_for(
    monkeypatch: pytest.MonkeyPatch, has: int, asked: int | None, quota: int, becomes: int
) -> None:
    given: list[int] = []
    monkeypatch.setattr("torch.get_num_threads", lambda: has)
    monkeypatch.setattr("torch.set_num_threads", given.append)
    monkeypatch.setattr(processor, "usable_cores", lambda: quota)
    set_compute_threads(asked)
    assert given == [becomes]


@pytest.mark.parametrize(("asked", "cores", "becomes"), [(2, 1, 1), (2, 8, 2), (5, 1, 5), (1, 8, 1)])
def test_readers_of_a_single_cpu(monkeypatch: pytest.MonkeyPatch, asked: int, cores: int, becomes: int) -> None:
    monkeypatch.setattr(processor, "usable_cores", lambda: cores)
    assert reading_threads(EngineConfig(io_threads=asked)) == becomes


def test_more_than_is_left_is_a_sentence_with_both_numbers(tree: Tree) -> None:
    tree("0::/", mounted(2), {"memory.max": 2 * GIB, "memory.current": 1 * GIB})
    assert shortage("a budget", 1 * GIB) is None
    sentence = shortage("a budget", 8 * GIB)
    assert sentence is not None and "8.00 GiB" in sentence and "1.00 GiB" in sentence
    assert "memory limit of this container" in sentence and "raise the container's limit" in sentence
