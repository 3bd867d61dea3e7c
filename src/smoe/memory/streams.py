"""Operations of a GPU besides computing: a queue of copies, events in the queues, and small transfers to the host.

Enqueuing returns at once, and operations run later, in the order of their queue. The link uses the device only through
`Streams`, so tests can replace it (`tests/memory/fake_streams.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Event(Protocol):
    """An event in a queue of the device. It occurs when everything that was enqueued before it is done."""

    def query(self) -> bool:
        """Return whether the event has occurred, without waiting for it."""

    def synchronize(self) -> None:
        """Block the calling thread until the event occurs. Raises errors of the device."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds, on the device, from this event to a later one. Both must have occurred."""


class Streams(Protocol):
    """The device's queues for computing and for copying. Only the computing thread calls `mark_computing` and
    `hold_computing`. Reading threads call the other methods, one thread at a time."""

    def mark_computing(self) -> Event:
        """Return an event that occurs when all work enqueued for computing until now is done."""

    def hold_computing(self, event: Any) -> None:
        """Make all work that is enqueued for computing after this call wait for an event."""

    def hold_copying(self, event: Any) -> None:
        """Make all copies that are enqueued after this call wait for an event."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> tuple[Event, Event]:
        """Enqueue a copy of `source` (uint8 [n], on the host) to `target`. Return two events: one directly before the
        copy and one directly after it."""

    def finish_copying(self) -> None:
        """Block until all enqueued copies are done."""


class CudaStreams:
    """A GPU's queues: the caller's current stream for computing, and a stream of our own for copying."""

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
    """A tensor that is being copied from the computing device to the host. A tensor that is on the host already is
    available at once.

    The computing thread creates the object and continues; any thread may wait for the tensor.
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
        """Wait until the tensor is on the host, and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._here


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return integers as an int64 tensor [n] on the computing device, without waiting for the device."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    # a copy from pageable memory would wait for everything enqueued before it
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)
