"""What is read to know the disk by.

Would catch experts that are read for the first time where a run reads again, one small buffer for all reads, and a rate
of bytes that never came.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smoe.config import EngineConfig
from smoe.machine import disk_rates
from smoe.machine.disk_rates import measure_reads
from smoe.machine.processor import reading_threads
from smoe.memory.expert_files import DiskReader
from smoe.memory.store import PAGE, Read

EXPERTS = 12


class Store:
    """Experts of a page each."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(EXPERTS * PAGE))
        self.path = path

    def keys(self) -> list[tuple[int, int]]:
        return [(0, expert) for expert in range(EXPERTS)]

    def reads(self, layer: int, expert: int) -> tuple[Read, ...]:
        return (Read(self.path, expert * PAGE, PAGE, 0, PAGE),)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """(offset, address of the buffer) of every read, one list for each measurement."""
    found: list[list[tuple[int, int]]] = []
    rate, read = disk_rates._rate, DiskReader.read

    def measured(*arguments: Any) -> Any:
        found.append([])
        return rate(*arguments)

    def noted(self: DiskReader, wanted: Read, buffer: memoryview, between: Any = None) -> int:
        found[-1].append((wanted.offset, torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()))
        return read(self, wanted, buffer, between)

    monkeypatch.setattr(disk_rates, "_rate", measured)
    monkeypatch.setattr(DiskReader, "read", noted)
    return found


def test_the_rate_is_of_what_has_been_read_before(tmp_path: Path, passes: list[list[tuple[int, int]]]) -> None:
    assert measure_reads(Store(tmp_path / "experts"), 60.0) > 0  # type: ignore[arg-type]
    assert [sorted(offset for offset, _ in each) for each in passes] == [[n * PAGE for n in range(EXPERTS)]] * 2


def test_of_a_large_model_what_fits_the_time_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So little time that each thread reads once: no other reads are offered again."""
    offered: list[list[Read]] = []
    rate = disk_rates._rate

    def measured(reader: DiskReader, reads: list[Read], seconds: float, buffers: Any) -> tuple[float, int]:
        offered.append(list(reads))
        return rate(reader, reads, seconds, buffers)

    monkeypatch.setattr(disk_rates, "_rate", measured)
    measure_reads(Store(tmp_path / "experts"), 1e-5)  # type: ignore[arg-type]
    first, again = offered
    assert len(first) == EXPERTS and again == first[: reading_threads(EngineConfig())]


def test_no_more_is_offered_than_the_fastest_disk_reads(tmp_path: Path, passes: list[list[tuple[int, int]]]) -> None:
    fitting = 3.5 * PAGE / disk_rates._MOST_RATE
    measure_reads(Store(tmp_path / "experts"), 2 * fitting)  # type: ignore[arg-type]
    assert len(passes[0]) <= 4 < EXPERTS


def test_reads_land_in_many_buffers_as_the_engine_s_do(tmp_path: Path, passes: list[list[tuple[int, int]]]) -> None:
    measure_reads(Store(tmp_path / "experts"), 60.0)  # type: ignore[arg-type]
    assert all(len({address for _, address in each}) == EXPERTS for each in passes)
