"""The emulated device's clock: run against a clock that the test turns itself.

Would catch: a resource that ends before its profile's time, lateness that goes unnoticed, a profile with a typing
error.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from smoe.errors import ConfigError
from smoe.memory.disk import CHUNK_BYTES
from smoe.memory.emulation import MARGIN, DeviceProfile, Emulation, read_profile
from smoe.memory.link import EmulatedLink

PROFILE = DeviceProfile("test", "made up", 1e9, 1e-3, 1e10, 1e12, 1e-4, 1e-3, 1e9, 1e11, 1e-4)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.pass_by)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_work_ends_when_it_is_due(clock: Clock) -> None:
    emulation = Emulation(PROFILE, 10.0, 1e6, 10**6)
    before = emulation.now()
    began = clock.now
    clock.pass_by(0.003)  # really done after 3 ms of the 20 that a dilation of 10 makes of 2
    emulation.finish(began, 0.002)
    assert clock.now == pytest.approx(began + 0.02)
    assert emulation.now() - before == pytest.approx(0.002)
    assert emulation.late_seconds == 0


def test_late_work_is_counted_and_not_hidden(clock: Clock) -> None:
    emulation = Emulation(PROFILE, 10.0, 1e6, 10**6)
    began = clock.now
    clock.pass_by(0.05)
    emulation.finish(began, 0.002)
    assert clock.now == pytest.approx(began + 0.05)
    assert emulation.late_seconds == pytest.approx(0.003)


def test_the_link_takes_the_profiles_time_for_every_byte(clock: Clock) -> None:
    emulation = Emulation(PROFILE, 5.0, 1e6, 10**6)
    link = EmulatedLink(emulation)
    nbytes = 2 * CHUNK_BYTES + 4096
    source, target = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    began, turns = clock.now, []
    link.copy(source, target, None, lambda: turns.append(int(target.count_nonzero()) > 0))
    assert torch.equal(source, target)
    assert turns == [True, True], "something urgent may pass after every chunk"
    assert clock.now - began == pytest.approx(5 * PROFILE.link_seconds(nbytes))
    assert list(link.measured()) == [pytest.approx(PROFILE.link_seconds(nbytes))]
    assert list(link.measured()) == []


def test_the_dilation_follows_the_slowest_resource() -> None:
    emulation = Emulation(PROFILE, None, 1e6, 10**6)
    emulation.choose_dilation(copy=0.002, expert=8e-4, host=1e-4, layer=1e-3)
    assert emulation.dilation == pytest.approx(MARGIN * 8e-4 / PROFILE.expert_seconds(10**6, 1))
    emulation.choose_dilation(copy=1e-9, expert=1e-9, host=1e-9, layer=1e-9)
    assert emulation.dilation == 1.0, "never faster than real"


@pytest.mark.parametrize("name", ["rtx-a6000", "rtx-4060-ti"])
def test_shipped_profiles_are_read(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name
    assert profile.link_seconds(9 * 2**20) > profile.expert_seconds(9 * 2**20, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"link_bytes_per_second": -1}, "positive"),
        ({"link_bytes_per_second": "fast"}, "positive"),
        ({"link_bandwidth": 3}, "link_bandwidth is unknown"),
        ({"name": None}, "name"),
    ],
)
def test_a_bad_profile_is_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(PROFILE)), encoding="utf8")
    assert read_profile(str(path)) == PROFILE
    path.write_text(json.dumps(asdict(PROFILE) | change), encoding="utf8")
    with pytest.raises(ConfigError, match=says):
        read_profile(str(path))


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="rtx-a6000"):
        read_profile("rtx-9090")
