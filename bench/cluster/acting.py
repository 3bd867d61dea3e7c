"""How fast a machine of the benchmark is: its disk, its arithmetic, and for main what lies between two layers' experts.

Everything is really read and computed; then it is waited until that would have ended there. Waiting takes no core, so a
machine with few of them can act many, as long as what they really do is small beside what they act. One disk does one
read at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

from smoe.cluster.worker import WorkerProcess
from smoe.compute import experts_alone
from smoe.expert import EXACT
from smoe.load import pretrained
from smoe.memory.movers import Filler
from smoe.memory.pacing import Pacing
from smoe.memory.quantised_store import QuantisedStore


class Times(NamedTuple):
    """Of one machine, in seconds."""

    load: float
    """An expert from its disk; 0: as fast as it comes."""
    expert: float
    """Computing an expert, for however many rows."""
    layer: float = 0.0
    """On main: attention, norms and router of one layer."""


class Dials:
    """What the benchmark and a machine's process both see; made before the process."""

    def __init__(self) -> None:
        self._values: Any = RawArray("d", 4)

    @property
    def loads(self) -> int:
        """Experts read, since the process began."""
        return int(self._values[0])

    def count_load(self) -> None:
        self._values[0] += 1

    @property
    def slowness(self) -> float:
        """By how much everything takes longer than it should."""
        return float(self._values[1]) or 1.0

    @slowness.setter
    def slowness(self, factor: float) -> None:
        self._values[1] = factor

    @property
    def lies(self) -> bool:
        """Whether the next message is to be nonsense."""
        return bool(self._values[2])

    @lies.setter
    def lies(self, does: bool) -> None:
        self._values[2] = does

    def reset(self) -> None:
        """A new process has read nothing, and does as it should."""
        for n in range(len(self._values)):
            self._values[n] = 0.0


def act(times: Times, dials: Dials) -> None:
    """From now on this process's disk and arithmetic are as slow. Before a model is opened."""
    _slow_disk(times.load, dials)
    pacing: Any = type("Acted", (_Acted,), {"times": times, "dials": dials})
    experts_alone.Pacing = pacing  # type: ignore[attr-defined]
    pretrained.Pacing = pacing  # type: ignore[attr-defined]


def lie_when_told(dials: Dials) -> None:
    """From now on this worker sends nonsense once whenever `Dials.lies` is set."""
    send: Any = WorkerProcess._send

    def sent(worker: WorkerProcess, dealer: Any, parts: list[Any]) -> Any:
        if dials.lies:
            dials.lies = False
            parts = [b"garbage", b"more"]
        return send(worker, dealer, parts)

    WorkerProcess._send = sent  # type: ignore[method-assign, assignment]


def _slow_disk(seconds: float, dials: Dials) -> None:
    fill: Any = Filler.fill
    lock, free = threading.Lock(), [0.0]

    def slowly(filler: Filler, *what: Any) -> int:
        came: int = fill(filler, *what)
        if isinstance(filler._stores[EXACT], QuantisedStore):
            return came  # a draft's, once and before the first token
        with lock:
            dials.count_load()
            ends = free[0] = max(time.perf_counter(), free[0]) + seconds * dials.slowness
        _wait_until(ends)
        return came

    Filler.fill = slowly  # type: ignore[method-assign, assignment]


class _Acted(Pacing):
    """As slow as `times`, multiplied by the slowness of the moment."""

    has_times_of_its_own = True
    times: Times
    dials: Dials
    _left = 0.0
    """When the last layer's experts were done."""

    def begin_pass(self) -> None:
        self._left = time.perf_counter()

    def reach_experts(self, tokens: int) -> None:
        del tokens
        _wait_until(self._left + self.times.layer * self.dials.slowness)

    def leave_experts(self) -> None:
        self._left = time.perf_counter()

    def compute_experts(self, began: float, rows: list[int]) -> None:
        _wait_until(began + len(rows) * self.times.expert * self.dials.slowness)

    @contextmanager
    def computing_on_host(self, rows: int) -> Iterator[None]:
        del rows
        began = time.perf_counter()
        yield
        _wait_until(began + self.times.expert * self.dials.slowness)


def _wait_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
