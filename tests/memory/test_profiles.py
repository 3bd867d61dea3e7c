"""The profiles that come with the program: each is read, dated, and a machine that there could be.

Would catch a rate in GB where bytes are meant, two entries exchanged, a card faster than its link suggests.
"""

from __future__ import annotations

from datetime import date
from importlib import resources

import pytest

from smoe.memory.emulation import FIGURES, DeviceProfile, read_profile

NAMES = sorted(
    entry.name.removesuffix(".json") for entry in (resources.files("smoe") / "profiles").iterdir()
)  # nothing but profiles lies there
EXPERT = 9 * 2**20


def test_the_machines_of_the_papers_are_there() -> None:
    cards = {"rtx-3080-ti", "rtx-4060-ti", "rtx-a5000", "rtx-a6000", "rtx-3090", "rtx-4090", "h200"}
    assert cards | {"jetson-agx-orin", "laptop-cpu", "raspberry-pi-5"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_a_machine_that_there_could_be(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name and profile.figures in FIGURES
    assert date(2026, 1, 1) <= date.fromisoformat(profile.date) and len(profile.source) > 50
    disk, device, host = profile.disk_bytes_per_second, profile.device_memory_bytes, profile.host_memory_bytes
    assert disk is not None and device is not None and host is not None
    assert 1e8 < disk <= profile.link_bytes_per_second < profile.device_bytes_per_second < 6e12
    assert 1e9 < profile.host_bytes_per_second <= profile.device_bytes_per_second
    assert 1e10 < profile.host_flops <= profile.device_flops < 1e15
    assert 4e9 < device <= 2e11 and device <= host
    assert 1e-6 < profile.device_expert_seconds < profile.device_layer_seconds < 1e-2
    if not profile.has_link:
        assert profile.link_bytes_per_second == disk and device == host


def test_faster_cards_compute_an_expert_in_less_time() -> None:
    """A few tokens are bound by memory, many by arithmetic; launches are the same for all cards."""

    def seconds(name: str, rows: int) -> float:
        profile: DeviceProfile = read_profile(name)
        return profile.expert_seconds(EXPERT, rows)

    by_memory = ["h200", "rtx-4090", "rtx-3090", "rtx-3080-ti", "rtx-a6000", "rtx-4060-ti", "raspberry-pi-5"]
    by_arithmetic = ["h200", "rtx-4090", "rtx-a6000", "rtx-a5000", "rtx-3090", "rtx-4060-ti", "laptop-cpu"]
    for names, rows in ((by_memory, 1), (by_arithmetic, 4096)):
        times = [seconds(name, rows) for name in names]
        assert times == sorted(times) and times[0] < times[-1]
