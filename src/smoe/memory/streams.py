"""What a GPU does in addition to computing: two queues of work, marks in them, and small tensors across the link.

Everything enqueued returns at once and happens later, in the order of its queue. `Streams` is all that the link knows
of the device, so that a test can hold it by the hand (`tests/memory/fake_streams.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A mark in a queue; it has come when all that was enqueued before it is done."""

    def query(self) -> bool:
        """Whether it has come."""

    def synchronize(self) -> None:
        """Block the calling thread until it has come; raises what the device has failed with."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds on the device from this mark to a later one; both must have come."""


class Streams(Protocol):
    """The queue that computes and the one that copies. `mark_computing` and `hold_computing` belong to the computing
    thread, the others to the reading threads, one at a time."""

    def mark_computing(self) -> Event:
        """A mark behind all computing that has been enqueued."""

    def hold_computing(self, event: Any) -> None:
        """What is enqueued for computing from now on begins after the mark."""

    def hold_copying(self, event: Any) -> None:
        """What is enqueued for copying from now on begins after the mark."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> tuple[Event, Event]:
        """Enqueue a copy of `source` (uint8 [n], on the host) to `target`: marks just before and just after it."""

    def finish_copying(self) -> None:
        """Block until all copies are done."""


class CudaStreams:
    """The caller's current stream computes; one of our own copies."""

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
        # blocking: the reading thread sleeps instead of spinning on a core that the CPU's experts need
        before, after = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with torch.cuda.stream(self._copying):
            before.record(self._copying)
            target.copy_(source, non_blocking=True)
            after.record(self._copying)
        return before, after

    def finish_copying(self) -> None:
        self._copying.synchronize()


class Fetched:
    """A tensor on its way from the device that computes to the host; a tensor of the host is there at once.

    Made by the computing thread, which goes on; any thread may wait.
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
        """Whether it comes from a memory of the device's own."""
        return self._event is not None

    def wait(self) -> torch.Tensor:
        """The tensor, on the host, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._here


class Waits(Counter[str]):
    """How often the computing thread has waited for the device, by what it wanted to know: everything that was
    enqueued before had to be done first. What waits in a layer goes through here and nowhere else."""

    def fetch(self, what: str, x: torch.Tensor) -> list[Any]:
        """The numbers of a tensor where the device computes."""
        self[what] += 1
        numbers: list[Any] = x.tolist()
        return numbers


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Whole numbers as int64 [n] where the device computes; the host does not wait for it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.long, device=device)
    # from pageable memory the copy would wait for everything enqueued before it
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)
