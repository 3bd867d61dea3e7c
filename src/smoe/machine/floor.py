"""The floor of the time per token: what the hardware alone would need for the bytes that must move (prose:
docs/metrics.md).

Two things bound a decode step: the bytes that have to come from a slower tier, and the bytes that the computing
device has to read from its own memory. Perfectly overlapped, the slower of the two is the floor; one after the other,
their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from smoe.metrics import Counters


@dataclass(frozen=True)
class Rates:
    """Measured bytes per second of one machine."""

    memory: float
    """Memory of the computing device, read."""
    disk: float | None
    """Disk at expert size; None: not measured."""
    link: float | None = None
    """Host memory to device; None on a machine that computes where the experts lie."""
    source: str = ""
    """Where the figures come from, for the reader."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step has to move."""

    memory: float
    """Expert weights used and all other weights, read from the computing device's memory."""
    disk: float
    link: float = 0.0


@dataclass(frozen=True)
class Floor:
    """Seconds that one decode step needs at least."""

    memory_seconds: float
    disk_seconds: float
    link_seconds: float

    @property
    def overlapped_seconds(self) -> float:
        """Everything at once: the floor."""
        return max(self.memory_seconds, self.disk_seconds, self.link_seconds)

    @property
    def serial_seconds(self) -> float:
        """One after the other: what an engine without overlap could reach."""
        return self.memory_seconds + self.disk_seconds + self.link_seconds

    @property
    def bound_by(self) -> str:
        """Which of them is the longest."""
        times = {"memory": self.memory_seconds, "disk": self.disk_seconds, "link": self.link_seconds}
        return max(times, key=times.__getitem__)


def floor_of(step: StepBytes, rates: Rates) -> Floor | None:
    """The floor of one step; None where bytes come from a tier whose rate was not measured."""
    disk = _seconds(step.disk, rates.disk)
    link = _seconds(step.link, rates.link)
    if disk is None or link is None:
        return None
    return Floor(step.memory / rates.memory, disk, link)


def measured_step(
    decode: Counters, expert_bytes: int, dense_bytes: int, has_link: bool, low_bytes: int = 0
) -> StepBytes | None:
    """Bytes per decode step of a run, by its own misses; None where no decode step ran. `low_bytes`: of a low copy."""
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
    """Bytes per decode step of one sequence whose experts are found in memory with the frequency `hit_ratio`."""
    missed = expert_bytes_per_token * (1 - hit_ratio)
    return StepBytes(memory=expert_bytes_per_token + dense_bytes, disk=missed, link=missed if has_link else 0.0)


def _seconds(count: float, rate: float | None) -> float | None:
    if count <= 0:
        return 0.0
    return None if not rate else count / rate
