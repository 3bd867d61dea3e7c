"""A prompt on a simulated cluster: every worker has one expert of each layer, rows travel over main's port.

    serial    load | main's part | rows out ...... | compute | rows back ......
    piped     load of the next layer ...............................
              main's part | rows out, batch after batch ..... |
                           compute | compute | compute | ...
                           rows back, while others go out .............. |

*Serial*: each waits for what is left of it. *Piped*: a second slot takes the next layer's expert meanwhile, rows go in
batches, the port works in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from smoe.simulator.cluster import Wire
from smoe.simulator.events import Events, Resource


@dataclass(frozen=True)
class PromptTimes:
    """The times of one prompt, all layers alike. Times in seconds."""

    layers: int
    layer: float
    """Main's part of a layer, for the whole prompt."""
    load: float
    """Seconds to load each worker's expert."""
    expert: float
    """One expert, for the rows of one batch."""
    rows: int
    """That each worker computes in a layer."""
    workers: int
    row_bytes: float
    wire: Wire
    slots: int = 1
    """The slots of each worker: 1, or 2 where the next layer's expert comes meanwhile."""
    batch_rows: int | None = None
    """Rows of a message; None: all of a worker's."""
    is_serial: bool = False
    """A layer's loads begin when the layer before is whole, main's part after them, and nothing comes back before all
    has gone out."""


def prefill_seconds(times: PromptTimes) -> float:
    """Seconds from the first load to the last row of the last layer."""
    return _serial(times) if times.is_serial else _Piped(times).seconds()


def _serial(times: PromptTimes) -> float:
    each = times.wire.seconds(times.rows * times.row_bytes)
    way = times.workers * each + times.wire.delay
    return times.layers * (times.load + times.layer + way + times.expert + way)


class _Piped:
    def __init__(self, times: PromptTimes) -> None:
        assert times.slots in (1, 2), times.slots
        self._times = times
        self._events = Events()
        self._up, self._down = Resource(self._events), Resource(self._events)
        self._arithmetic = [Resource(self._events) for _ in range(times.workers)]
        batch = times.batch_rows or times.rows
        self._batches = [min(batch, times.rows - begin) for begin in range(0, times.rows, batch)]
        self._loaded = [0] * times.workers
        """Layers whose expert has come, of every worker."""
        self._done = [0] * times.workers
        """Batches computed, of all layers."""
        self._waiting: list[list[int]] = [[] for _ in range(times.workers)]
        """Rows that have come before their expert: how many, batch by batch."""
        self._awaited = 0
        self._layer = 0
        self._ended = 0.0

    def seconds(self) -> float:
        for worker in range(self._times.workers):
            self._load(worker)
        self._begin_layer()
        self._events.run()
        return self._ended

    def _load(self, worker: int) -> None:
        """The next layer's expert, if a slot is free and nothing else is on its way."""
        if self._loaded[worker] < self._times.layers and self._has_room(worker):
            self._events.at(self._events.now + self._times.load, partial(self._arrived, worker))

    def _arrived(self, worker: int) -> None:
        self._loaded[worker] += 1
        for rows in self._waiting[worker]:
            self._compute(worker, rows)
        self._waiting[worker] = []
        self._load(worker)

    def _begin_layer(self) -> None:
        self._events.at(self._events.now + self._times.layer, self._send)

    def _send(self) -> None:
        """Batch after batch, each to all workers in turn."""
        times = self._times
        self._awaited = len(self._batches) * times.workers
        for rows in self._batches:
            for worker in range(times.workers):
                end = self._up.use(times.wire.seconds(rows * times.row_bytes)) + times.wire.delay
                self._events.at(end, partial(self._has_rows, worker, rows))

    def _has_rows(self, worker: int, rows: int) -> None:
        if self._loaded[worker] > self._layer:
            self._compute(worker, rows)
        else:
            self._waiting[worker].append(rows)

    def _compute(self, worker: int, rows: int) -> None:
        end = self._arithmetic[worker].use(self._times.expert)
        self._events.at(end, partial(self._computed, worker, rows))

    def _computed(self, worker: int, rows: int) -> None:
        had_room = self._has_room(worker)
        self._done[worker] += 1
        if not had_room and self._has_room(worker):
            self._load(worker)
        self._events.at(self._events.now + self._times.wire.delay, partial(self._comes_back, rows))

    def _has_room(self, worker: int) -> bool:
        return self._loaded[worker] - self._done[worker] // len(self._batches) < self._times.slots

    def _comes_back(self, rows: int) -> None:
        end = self._down.use(self._times.wire.seconds(rows * self._times.row_bytes))
        self._events.at(end, self._is_back)

    def _is_back(self) -> None:
        self._awaited -= 1
        if self._awaited:
            return
        self._layer += 1
        self._ended = self._events.now
        if self._layer < self._times.layers:
            self._begin_layer()
