"""Computes the floor of the time per token: the time that the hardware needs to move the bytes (docs/metrics.md).

A decode step moves bytes from a slower tier, and bytes that the computing device reads from its own memory. If both
overlap perfectly, the floor is the time of the slower one; without overlap it is the sum of both times.
"""

from __future__ import annotations

from dataclasses import dataclass

from smoe.metrics import Counters


@dataclass(frozen=True)
class Rates:
    """Measured rates of one machine in bytes per second."""

    memory: float
    """The rate at which the computing device reads its own memory."""
    disk: float | None
    """The rate of reads that have the size of an expert; None if it was not measured."""
    link: float | None = None
    """The rate from host memory to the device; None without a link."""
    source: str = ""
    """A text about where the rates come from."""


@dataclass(frozen=True)
class StepBytes:
    """The bytes that one decode step moves, by the tier of memory from which they come."""

    memory: float
    """Bytes of the used experts and of all other weights, read from the computing device's memory."""
    disk: float
    link: float = 0.0


@dataclass(frozen=True)
class Floor:
    """The floor of a decode step: the least time that each tier of memory needs for its bytes, in seconds."""

    memory_seconds: float
    disk_seconds: float
    link_seconds: float

    @property
    def overlapped_seconds(self) -> float:
        """The floor in seconds if all transfers run at once: the time of the slowest one."""
        return max(self.memory_seconds, self.disk_seconds, self.link_seconds)

    @property
    def serial_seconds(self) -> float:
        """The floor in seconds if the transfers of all tiers run one after the other."""
        return self.memory_seconds + self.disk_seconds + self.link_seconds

    @property
    def bound_by(self) -> str:
        """The name of the memory tier that needs the most time for its bytes."""
        times = {"memory": self.memory_seconds, "disk": self.disk_seconds, "link": self.link_seconds}
        return max(times, key=times.__getitem__)


def floor_of(step: StepBytes, rates: Rates) -> Floor | None:
    """Return the floor of one decode step, the least time for the bytes that it moves. Return None if bytes come from a
    tier whose rate is unknown."""
    disk = _seconds(step.disk, rates.disk)
    link = _seconds(step.link, rates.link)
    if disk is None or link is None:
        return None
    return Floor(step.memory / rates.memory, disk, link)


def measured_step(
    decode: Counters, expert_bytes: int, dense_bytes: int, has_link: bool, low_bytes: int = 0
) -> StepBytes | None:
    """Return the bytes that an average decode step of a run has moved, computed from the run's counters. Return None if
    there was no decode step.

    `low_bytes`: the size of an expert's low-precision copy.
    """
    steps = decode.forward_passes
    if steps == 0:
        return None
    own = (decode.loads + decode.prefetches - decode.low_loads) * expert_bytes
    brought = (own + decode.low_loads * low_bytes) / steps
    used = (decode.decode_uses - decode.low_served) * expert_bytes + decode.low_served * low_bytes
    return StepBytes(
        memory=used / steps + dense_bytes,
        disk=min(brought, decode.bytes_read / steps),
        link=brought if has_link else 0.0,
    )


def step_at(expert_bytes_per_token: int, dense_bytes: int, hit_ratio: float, has_link: bool = False) -> StepBytes:
    """Return the bytes that a decode step of one sequence moves if the fraction `hit_ratio` of its experts is
    resident."""
    missed = expert_bytes_per_token * (1 - hit_ratio)
    return StepBytes(memory=expert_bytes_per_token + dense_bytes, disk=missed, link=missed if has_link else 0.0)


def _seconds(count: float, rate: float | None) -> float | None:
    if count <= 0:
        return 0.0
    return None if not rate else count / rate
