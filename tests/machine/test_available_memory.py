"""What this process may take, as three systems tell it, and the process itself.

Would catch: memory counted as free that others would have to give up, a limit that is not looked at, kibibytes
taken for bytes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from smoe.machine import findings, process_memory, sysctl
from smoe.machine.available_memory import free_host_bytes
from smoe.machine.processor import processor_name, usable_cores

GIB = 2**30
PAGE = 16384
AVAILABLE = 12 * GIB


@pytest.fixture(autouse=True)
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=AVAILABLE, total=16 * GIB))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """macOS: what it says of itself, by name; numbers of 32 bits, or texts."""
    values: dict[str, Any] = {
        "vm.pagesize": PAGE,
        "vm.page_free_count": 1 * GIB // PAGE,
        "vm.page_pageable_external_count": 3 * GIB // PAGE,
        "vm.page_purgeable_count": GIB // 2 // PAGE,
        "kern.memorystatus_vm_pressure_level": 1,
        "machdep.cpu.brand_string": "Apple M2",
    }

    def sysctlbyname(name: bytes, into: int, nbytes: Any, new: Any, new_bytes: int) -> int:
        assert not new and not new_bytes, "nothing is set"
        if name.decode() not in values:
            return -1
        value = values[name.decode()]
        data = value.encode() + b"\0" if isinstance(value, str) else value.to_bytes(4, "little")
        assert nbytes.contents.value >= len(data)
        ctypes.memmove(into, data, len(data))
        nbytes.contents.value = len(data)
        return 0

    size = ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(size), ctypes.c_void_p, size)
    function = kind(sysctlbyname)
    monkeypatch.setattr(sysctl, "_sysctlbyname", lambda: function)
    monkeypatch.setattr(sys, "platform", "darwin")
    yield values


def test_macos_leaves_others_idle_memory_alone(told: dict[str, Any]) -> None:
    nbytes, source = free_host_bytes()
    assert nbytes == 4.5 * GIB and "without other programs' idle memory" in source
    told["vm.page_free_count"] = 100 * GIB // PAGE
    assert free_host_bytes() == (AVAILABLE, "available RAM"), "whichever is less"
    told["vm.page_free_count"] = 1
    del told["vm.page_purgeable_count"]
    assert free_host_bytes() == (AVAILABLE, "available RAM"), "what is not told is not guessed"


def test_macos_names_its_processor_and_its_pressure(told: dict[str, Any]) -> None:
    assert processor_name() == "Apple M2"
    assert findings._pressure() is None
    told["kern.memorystatus_vm_pressure_level"] = 4
    found = findings._pressure()
    assert found is not None and found.grade == "better" and "(critical)" in found.text


def profile() -> Any:
    return SimpleNamespace(machine={"memory_bytes": 16 * GIB}, disk_is_direct=True)


def test_the_doctor_tells_what_it_found(told: dict[str, Any]) -> None:
    found = findings._free_memory(profile())
    assert found.grade == "better" and "4.50 GiB" in found.text and "close other programs" in found.advice
    direct = findings._direct_io(profile(), SimpleNamespace())  # type: ignore[arg-type]
    assert "F_NOCACHE" in direct.text


def test_the_doctor_says_that_windows_reads_through_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    found = findings._direct_io(SimpleNamespace(disk_is_direct=False), SimpleNamespace())  # type: ignore[arg-type]
    assert found.grade == "better" and "on Windows" in found.text and "WSL" in found.advice


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_before", [])


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_a_process_where_files_are_not_told_apart(platform: str, begun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 MB before the model, 1000 at the peak, of which the budget had 500."""
    held = SimpleNamespace(rss=400_000_000, peak_wset=400_000_000)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: held)
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=held.peak_wset))  # bytes, on macOS
    monkeypatch.setattr(sys, "platform", platform)
    process_memory.note_start()
    assert process_memory.libraries_bytes() == 400_000_000
    held.rss, held.peak_wset = 900_000_000, 1_000_000_000
    assert process_memory.peak_bytes() == 1_000_000_000
    assert process_memory.process_memory(500_000_000) == (1_000_000_000, 400_000_000, 500_000_000, 100_000_000)


def test_the_linux_peak_is_in_bytes() -> None:
    if sys.platform == "linux":
        assert abs(process_memory.peak_bytes() - process_memory._status().peak) < 2**26  # type: ignore[operator, union-attr]


def test_cores_where_no_system_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("smoe.machine.processor.cpu_quota", lambda: None)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert usable_cores() == 12
