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
from smoe.memory.emulation import MARGIN, DeviceProfile, Emulation, read_emulated, read_profile
from smoe.memory.expert_files import CHUNK_BYTES
from smoe.memory.link import EmulatedLink
from tests.memory.fake_clock import NEAR, Clock

PROFILE = DeviceProfile("test", "made up", 1e9, 1e-3, 1e10, 1e12, 1e-4, 1e-3, 1e9, 1e11, 1e-4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_work_ends_when_it_is_due(clock: Clock) -> None:
    emulation = Emulation(PROFILE, 10.0, 1e6, 10**6)
    before = emulation.now()
    began = clock.now
    clock.pass_by(0.003)  # really done after 3 ms of the 20 that a dilation of 10 makes of 2
    emulation.finish(began, 0.002)
    assert clock.now == pytest.approx(began + 0.02, abs=NEAR)
    assert emulation.now() - before == pytest.approx(0.002, abs=NEAR)
    assert emulation.late_seconds == 0


def test_late_work_is_counted_and_not_hidden(clock: Clock) -> None:
    emulation = Emulation(PROFILE, 10.0, 1e6, 10**6)
    began = clock.now
    clock.pass_by(0.05)
    emulation.finish(began, 0.002)
    assert clock.now == pytest.approx(began + 0.05, abs=NEAR)
    assert emulation.late_seconds == pytest.approx(0.003, abs=NEAR)


def test_the_link_takes_the_profiles_time_for_every_byte(clock: Clock) -> None:
    emulation = Emulation(PROFILE, 5.0, 1e6, 10**6)
    link = EmulatedLink(emulation)
    nbytes = 2 * CHUNK_BYTES + 4096
    source, target = torch.arange(nbytes, dtype=torch.int32).to(torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    began, turns = clock.now, []
    link.copy(source, target, None, lambda: turns.append(int(target.count_nonzero()) > 0))
    assert torch.equal(source, target)
    assert turns == [True, True], "something urgent may pass after every chunk"
    assert clock.now - began == pytest.approx(5 * PROFILE.link_seconds(nbytes), abs=NEAR)
    ((seconds, copied),) = link.measured()
    assert (seconds, copied) == (pytest.approx(PROFILE.link_seconds(nbytes), abs=NEAR), nbytes)
    assert list(link.measured()) == []


def test_link_and_cpu_share_the_memory(clock: Clock) -> None:
    """One gigabyte a second for both: while the CPU computes, each has half of it."""
    emulation = Emulation(PROFILE, 10.0, 1e6, 10**6)
    before = emulation.now()
    with emulation.carrying(10**6, is_first=False), emulation.computing_on_host(1):
        pass  # the CPU ends first: it has as many bytes to read, and began no earlier
    alone = PROFILE.link_seconds(10**6) - PROFILE.link_latency_seconds
    assert emulation.now() - before == pytest.approx(2 * alone + PROFILE.host_expert_seconds, abs=NEAR)


def test_experts_stand_for_larger_ones(clock: Clock) -> None:
    """Chunks are of the larger size, too: nothing urgent waits longer than it would there."""
    emulation = Emulation(PROFILE, 5.0, 1e6, expert_bytes=1000, as_if_bytes=2 * CHUNK_BYTES)
    link, turns = EmulatedLink(emulation), []
    source, target = torch.ones(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    before = emulation.now()
    link.copy(source, target, None, lambda: turns.append(int(target.sum())))
    assert turns == [500]
    assert torch.equal(source, target)
    assert emulation.now() - before == pytest.approx(PROFILE.link_seconds(2 * CHUNK_BYTES), abs=NEAR)
    before = emulation.now()
    with emulation.computing_on_host(1):
        pass
    assert emulation.now() - before == pytest.approx(PROFILE.host_seconds(2 * CHUNK_BYTES, 1), abs=NEAR)


def test_deciding_is_not_divided_by_the_dilation(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our Python takes as long beside a fast device; what others take of the core meanwhile is not ours."""
    processor = [7.0]
    monkeypatch.setattr(time, "thread_time", lambda: processor[0])
    emulation = Emulation(PROFILE, 10.0, 1e6, 10**6)
    before, planning = emulation.now(), emulation.begin_planning()
    processor[0] += 0.002
    clock.pass_by(0.002)
    emulation.end_planning(planning)
    assert emulation.now() - before == pytest.approx(0.002, abs=NEAR)


def test_the_dilation_follows_the_slowest_resource() -> None:
    emulation = Emulation(PROFILE, None, 1e6, 10**6)
    emulation.choose_dilation(copy=0.002, expert=8e-4, host=1e-4, layer=1e-3)
    assert emulation.dilation == pytest.approx(MARGIN * 8e-4 / PROFILE.expert_seconds(10**6, 1), abs=NEAR)
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
        ({"link_bytes_per_second": 1e-300}, "positive"),
        ({"link_bytes_per_second": float("inf")}, "positive"),
        ({"link_bandwidth": 3}, "has link_bandwidth, which no profile has"),
        ({"name": None}, "None for name; it must be text"),
        ({"has_link": 1}, "1 for has_link; it must be true or false"),
        ({"disk_bytes_per_second": 0}, "0 for disk_bytes_per_second; it must be a positive number"),
        ({"figures": "guessed"}, "'guessed' for figures; it must be published or measured"),
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
    with pytest.raises(
        ConfigError, match=r"no such profile or file.*give h200, .*rtx-4060-ti, .*rtx-a6000 or the path"
    ) as error:
        read_profile("nofile.json")
    assert error.value.facts["setting"] == "profile" and error.value.facts["given"] == "nofile.json"
    with pytest.raises(ConfigError, match="did you mean rtx-a6000"):
        read_profile("rtx-a600")
    with pytest.raises(ConfigError, match="without a device to emulate"):
        read_emulated("raspberry-pi-5")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "which holds a JSON list; it must hold an object with the entries name, source, link_bytes_per"),
        ("3", "which holds a JSON value; it must hold an object"),
        ('{"name": "x"}', r"which lacks source, .*; add what is missing .*rtx-a6000\.json is a whole profile"),
        ("fast", "which is no JSON .Expecting value in line 1."),
        ("\udcff", "which is no text; give"),
    ],
)
def test_a_file_that_is_no_profile_says_what_one_is(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(text.encode("utf8", "surrogateescape"))
    with pytest.raises(ConfigError, match=says):
        read_profile(str(path))


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(str(tmp_path))
