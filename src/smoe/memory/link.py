"""From the host tier to the device, chunk by chunk, so that something more urgent waits for one chunk at most.

Two links: a copy stream of a GPU, and an emulated one (`emulation.py`). Both measure what a copy takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from smoe.memory.disk import CHUNK_BYTES
from smoe.memory.emulation import Emulation

_Between = Callable[[], None] | None


class Link(Protocol):
    """Carries one expert's bytes; called by the reading threads, several at a time."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, free_event: Any, between: _Between) -> Any:
        """Copy all of `source` (uint8 [n]) once `free_event` has come; returns the event of arrival, None if it has."""

    def mark_free(self) -> Any:
        """An event after which slots given up so far may be overwritten; None where that is now."""

    def measured(self) -> Iterator[float]:
        """Seconds of every copy that has ended since the last call."""

    def close(self) -> None: ...


class CudaLink:
    """A stream beside the computing one. The host never waits; events order the two."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=64)

    def copy(self, source: torch.Tensor, target: torch.Tensor, free_event: Any, between: _Between) -> Any:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free_event)
            began.record(self._stream)
            for begin, end in _chunks(source.numel(), between):
                target[begin:end].copy_(source[begin:end], non_blocking=True)
            ended.record(self._stream)
        self._timed.append((began, ended))
        return ended

    def mark_free(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def measured(self) -> Iterator[float]:
        while self._timed and self._timed[0][1].query():
            began, ended = self._timed.popleft()
            yield began.elapsed_time(ended) / 1e3

    def close(self) -> None:
        self._stream.synchronize()


class EmulatedLink:
    """Copies in RAM at a profile's pace, one chunk at a time whatever the number of threads."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._one_at_a_time = threading.Lock()
        self._timed: deque[float] = deque(maxlen=64)

    def copy(self, source: torch.Tensor, target: torch.Tensor, free_event: Any, between: _Between) -> Any:
        profile, total = self._emulation.profile, 0.0
        for begin, end in _chunks(source.numel(), between):
            with self._one_at_a_time:
                began = time.perf_counter()
                target[begin:end].copy_(source[begin:end])
                latency = profile.link_latency_seconds if begin == 0 else 0.0
                self._emulation.finish(began, latency + (end - begin) / profile.link_bytes_per_second)
                total += time.perf_counter() - began
        self._timed.append(total / self._emulation.dilation)

    def mark_free(self) -> Any:
        return None

    def measured(self) -> Iterator[float]:
        while self._timed:
            yield self._timed.popleft()

    def close(self) -> None:
        pass


def _chunks(nbytes: int, between: _Between) -> Iterator[tuple[int, int]]:
    for begin in range(0, nbytes, CHUNK_BYTES):
        if begin and between is not None:
            between()
        yield begin, min(begin + CHUNK_BYTES, nbytes)
