"""The floor by hand: plain divisions, and who is the slowest."""

from __future__ import annotations

import pytest

from smoe.cli.summary import _rows
from smoe.generation.generate import Answer, Generation
from smoe.machine.floor import Rates, StepBytes, floor_of, measured_step, step_at
from smoe.metrics import Counters
from smoe.report.run import RunReport


def test_slowest_tier_is_the_floor():
    floor = floor_of(StepBytes(memory=30e9, disk=4e9, link=0), Rates(memory=30e9, disk=2e9))
    assert floor.overlapped_seconds == 2.0 and floor.serial_seconds == 3.0 and floor.bound_by == "disk"


def test_link_counts_on_a_machine_that_has_one():
    floor = floor_of(StepBytes(memory=1e9, disk=0, link=5e9), Rates(memory=1e12, disk=None, link=25e9))
    assert floor.bound_by == "link" and floor.overlapped_seconds == pytest.approx(0.2)


def test_bytes_from_a_tier_that_nobody_measured_have_no_floor():
    assert floor_of(StepBytes(memory=1, disk=1), Rates(memory=1, disk=None)) is None
    assert floor_of(StepBytes(memory=1, disk=0), Rates(memory=1, disk=None)) is not None


def test_measured_step_counts_the_runs_own_misses():
    decode = Counters(forward_passes=10, decode_uses=960, decode_hits=900, loads=60, bytes_read=60 * 1000)
    step = measured_step(decode, expert_bytes=990, dense_bytes=5000, has_link=False)
    assert step.disk == 60 * 990 / 10, "alignment is no fault of the hardware"
    assert step.memory == 960 * 990 / 10 + 5000 and step.link == 0


def test_low_copies_are_fewer_bytes():
    """Of 8 uses 3 by low copies, of 4 loads 2 of low copies."""
    decode = Counters(forward_passes=1, decode_uses=8, loads=4, low_served=3, low_loads=2, bytes_read=10**6)
    step = measured_step(decode, expert_bytes=1000, dense_bytes=0, has_link=True, low_bytes=300)
    assert (step.memory, step.disk, step.link) == (5 * 1000 + 3 * 300, 2600, 2600)


def test_a_host_cache_saves_the_disk_but_not_the_link():
    decode = Counters(forward_passes=1, decode_uses=8, loads=8, bytes_read=2 * 100)
    step = measured_step(decode, expert_bytes=100, dense_bytes=0, has_link=True)
    assert (step.disk, step.link) == (200, 800)


def test_no_decode_step_no_floor():
    assert measured_step(Counters(forward_passes=0), 1, 1, False) is None


@pytest.mark.parametrize(("share", "disk"), [(0.0, 800), (0.25, 600), (1.0, 0)])
def test_what_is_not_found_in_memory_is_read(share, disk):
    step = step_at(expert_bytes_per_token=800, dense_bytes=200, hit_ratio=share)
    assert (step.disk, step.memory, step.link) == (disk, 1000, 0)


def report(step_seconds: list[float], bytes_per_step: float, disk_rate: float) -> RunReport:
    """A run whose steps took these times, reading this much in each."""
    times = [0.0]
    for seconds in step_seconds:
        times.append(times[-1] + seconds)
    decode = Counters(forward_passes=len(step_seconds), forward_seconds=times[-1])
    generation = Generation([Answer(1)], -1.0, times, times[-1], decode, decode, False, [])
    rates = Rates(memory=1e12, disk=disk_rate, source="a test")
    floor = floor_of(StepBytes(memory=1.0, disk=bytes_per_step), rates)
    return RunReport(
        generation,
        0.5,
        bytes_per_step,
        1,
        1,
        None,
        floor,
        rates,
        {},
        0.0,
        (),
        "native",
        "bf16",
        None,
        {},
        {},
        None,
        None,
    )


def test_the_limit_is_of_the_mean_step():
    """A cold start reads much and the median step little: mean bytes over a median time came to 177 %."""
    cold = report([1.0, 0.1, 0.1], bytes_per_step=4e8, disk_rate=1e9)
    assert cold.floor_share == pytest.approx(0.4 / 0.4) and not cold.beats_rates


def test_never_above_the_limit_without_a_reason():
    """Bytes that came from a cache were faster than the rate that was measured."""
    cached = report([0.1, 0.1], bytes_per_step=4e8, disk_rate=1e9)
    assert cached.floor_share == 1.0 and cached.beats_rates
    (line,) = [text for name, text in _rows(cached) if name == "hardware limit"]
    assert "%" not in line and line.startswith("this run was faster")
    (line,) = [text for name, text in _rows(report([1.0, 0.1, 0.1], 4e8, 1e9)) if name == "hardware limit"]
    assert line.startswith(
        "this run reached 100% of the speed that this hardware allows. At full speed the disk takes the longest time: "
        "400 ms a token (a test)."
    )
