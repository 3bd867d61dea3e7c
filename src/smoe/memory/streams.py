"""GPU operations besides computing: a queue for copies, events in both queues, and small transfers to the host.

Enqueuing returns at once, and operations run later in the order of their queue. The link uses the device only through
`Streams`, so that tests can replace it (`tests/memory/fake_streams.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Event(Protocol):
    """An event in a queue; it occurs when everything enqueued before it is done."""

    def query(self) -> bool:
        """Return whether the event has occurred."""

    def synchronize(self) -> None:
        """Block the calling thread until the event occurs; raises the device's errors."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds on the device from this event to a later one; both must have occurred."""


class Streams(Protocol):
    """The computing queue and the copying queue. Only the computing thread calls `mark_computing` and `hold_computing`;
    reading threads call the other methods, one at a time."""

    def mark_computing(self) -> Event:
        """Return an event after everything enqueued for computing so far."""

    def hold_computing(self, event: Any) -> None:
        """Make everything enqueued for computing from now on wait for an event."""

    def hold_copying(self, event: Any) -> None:
        """Make everything enqueued for copying from now on wait for an event."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> tuple[Event, Event]:
        """Enqueue a copy of `source` (uint8 [n], on the host) to `target`; return the events directly before and after
        it."""

    def finish_copying(self) -> None:
        """Block until all copies are done."""


class CudaStreams:
    """The caller's current stream for computing, and a stream of our own for copying."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = torch.cuda.Stream(device)

    def mark_computing(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def hold_computing(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def hold_copying(self, event: Any) -> None:
        self._copying.wait_event(event)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> tuple[Event, Event]:
        # blocking events: the reading thread sleeps and leaves its core to experts on the CPU
        before, after = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with torch.cuda.stream(self._copying):
            before.record(self._copying)
            target.copy_(source, non_blocking=True)
            after.record(self._copying)
        return before, after

    def finish_copying(self) -> None:
        self._copying.synchronize()


class Fetched:
    """A tensor being copied from the computing device to the host; a host tensor is available at once.

    The computing thread creates it and continues; any thread may wait.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._here = x
        if x.device.type == "cuda":
            self._here = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._here.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(x.device))

    @property
    def is_from_device(self) -> bool:
        """Whether the tensor comes from a device with its own memory."""
        return self._event is not None

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._here


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return integers as int64 [n] on the computing device, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    # a copy from pageable memory would wait for everything enqueued before it
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)
