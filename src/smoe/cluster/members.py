"""The coordinator's record of its workers: their states, the experts they hold, their times.

    HELLO -> PROVING --equal bits--> READY --late, or silent--> SUSPECT --a result, or a sign of life--> READY
                |                      |                             |
                `--other bits--------> OUT <--disconnected, silent, or late several times in succession

The experts that a worker holds are inferred, not requested: it holds the experts that it used last, as many as it has
slots. If this inference is wrong, only a forecast of time is wrong.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

from smoe.cluster.frames import Times
from smoe.compute.unit import ExpertTask
from smoe.expert import ExpertKey
from smoe.policy.load_or_compute import FLAT
from smoe.policy.placement import WorkerView

_WEIGHT = 0.2
"""The weight of the last measurement in a moving average."""
_LEAST_DEADLINE, _MOST_DEADLINE = 0.025, 30.0
_DEADLINE_FACTOR = 3.0
_UNKNOWN_SECONDS = 2.0
"""The expected seconds of a request while nothing has been measured."""
_LATE_USES = 512
"""The number of requested experts after which the counts `uses` and `brought` are halved, so that recent requests count
more."""


class Loss(NamedTuple):
    """A worker that was connected and is lost."""

    name: str
    why: str
    at: float
    """The time of the loss, in Unix time."""


class WorkerTotals(NamedTuple):
    """The totals of a worker's work. Proofs, the tests of a new worker, are not counted."""

    experts: int = 0
    """The number of computed experts."""
    checked: int = 0
    """The number of computed experts that the coordinator has recomputed."""
    requests: int = 0
    missed: int = 0
    """The number of missed deadlines."""

    def plus(self, other: WorkerTotals) -> WorkerTotals:
        """Return the sums of these totals and `other`."""
        return WorkerTotals(*map(sum, zip(self, other, strict=True)))


NOTHING = WorkerTotals()


class WorkerState(Enum):
    """The state of a worker."""

    PROVING = "is being checked"
    READY = "ready"
    SUSPECT = "late"
    OUT = "out"


@dataclass
class Member:
    """The coordinator's record of one worker. The link's thread changes the state and the times; the computing thread
    changes the experts that the worker holds."""

    unit: int
    """The worker's number in plans."""
    name: str
    key: str
    """The worker's public key."""
    route: bytes
    """The worker's ZeroMQ routing id."""
    slots: int
    state: WorkerState = WorkerState.PROVING
    last_seen: float = 0.0
    """The time of its last message (`time.monotonic`)."""
    answered: float = 0.0
    """The time of its last results."""
    late: float = 0.0
    """The time when it was last found to be late."""
    why: str = ""
    """The reason why the worker was removed; empty: it was not."""
    load: float = 0.0
    """Seconds in which the worker loads an expert. This value and the next three are moving averages."""
    expert: float = 0.0
    """Seconds to compute an expert for few rows."""
    row: float = 0.0
    """Seconds per row for many rows."""
    hop: float = 0.0
    """Seconds for sending a message with few rows and receiving the reply, without the time of computing."""
    experts: int = 0
    """The number of experts computed so far."""
    checked: int = 0
    """The number of experts that the coordinator has recomputed."""
    uses: int = 0
    """The number of experts that were requested recently."""
    brought: int = 0
    """The number of experts that the worker loaded recently, for requests or in advance."""
    brought_at: float = -inf
    """The time at which the worker was last sent experts to load."""
    requests: int = 0
    missed: int = 0
    """The number of missed deadlines."""
    strikes: int = 0
    """The number of missed deadlines since the last result."""
    has_answered: bool = False
    has_proven: bool = False
    earlier: WorkerTotals = NOTHING
    """The totals of the worker's earlier connections."""
    most_rows: float = inf
    """The maximum number of rows of one expert that the worker computes. Without torch, it is the number with which its
    kernels were tested."""
    _holds: OrderedDict[ExpertKey, None] = field(default_factory=OrderedDict)
    _expected: set[ExpertKey] = field(default_factory=set)
    """Experts that were announced to the worker last. Other experts are evicted before them."""
    _late: set[ExpertKey] = field(default_factory=set)
    """Experts that were announced to the worker and have not been requested yet. The worker may have loaded them by
    now."""

    @property
    def is_here(self) -> bool:
        """Whether the worker is connected and may get requests."""
        return self.state is WorkerState.READY

    def is_proven(self) -> None:
        """Start to count the worker's work: it has passed its proofs, so its results are used from now on."""
        self.has_proven = True
        self.experts = self.requests = self.uses = self.brought = 0

    @property
    def done(self) -> WorkerTotals:
        """The totals of all connections of this worker."""
        now = (
            WorkerTotals(self.experts, self.checked, self.requests, self.missed) if self.has_proven else WorkerTotals()
        )
        return self.earlier.plus(now)

    def takes(self, wanted: Iterable[ExpertTask]) -> bool:
        """Return whether the worker may get a request: it is ready, and no requested expert has more rows than it can
        compute."""
        return self.is_here and max(len(each.tokens) for each in wanted) <= self.most_rows

    def view(self) -> WorkerView:
        """Return the numbers about this worker from which plans are made."""
        return WorkerView(
            self.unit, self._holds, self.load, self.expert, self.row, self.hop, 0.0, self.brought_at, self.most_rows
        )

    def will_hold(self, keys: Iterable[ExpertKey]) -> int:
        """Record that the worker will have these experts in memory from now on. Return how many of them it must
        load."""
        missing = 0
        for key in keys:
            if key in self._holds:
                self._holds.move_to_end(key)
                continue
            missing += 1
            if len(self._holds) >= self.slots:
                del self._holds[
                    next((held for held in self._holds if held not in self._expected), next(iter(self._holds)))
                ]
            self._holds[key] = None
            self.brought_at = time.monotonic()
        return missing

    def will_use(self, keys: Sequence[ExpertKey]) -> int:
        """Record that the worker gets a request for these experts. Return how many of them it must load."""
        missing = self.will_hold(keys)
        if self.uses >= _LATE_USES:
            self.uses, self.brought = self.uses // 2, self.brought // 2
        self.uses, self.brought = self.uses + len(keys), self.brought + missing
        return missing

    def will_bring(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Record that these experts are announced to the worker. Return the experts that it must load."""
        missing = [key for key in keys if key not in self._holds]
        self._expected = set(keys)
        self.brought += self.will_hold(missing)
        self._late.update(missing)
        return missing

    def take_coming(self, keys: Iterable[ExpertKey]) -> int:
        """Record that experts which were announced to the worker are requested now. Return how many announced loads may
        delay the request: loads of the requested experts, and one load that is already running."""
        there = len(self._late & self._holds.keys())
        self._late.difference_update(keys)
        self._expected.difference_update(keys)
        left = len(self._late & self._holds.keys())
        return there - left + min(left, 1)

    def expected(self, wanted: Iterable[ExpertTask], loads: int) -> float:
        """Return the seconds in which the worker should answer a request that needs `loads` loads, if no other requests
        wait."""
        if not self.has_answered:
            return _UNKNOWN_SECONDS
        computing = sum(max(self.expert, len(each.tokens) * self.row) for each in wanted)
        return self.hop + loads * self.load + computing

    def note(self, wanted: Iterable[ExpertTask], whole: float, times: Times, queued: bool = False) -> None:
        """Update the worker's averages from a request that was answered after `whole` seconds. `queued`: the request
        was sent while another was in flight, so `whole` does not measure the round trip. `times`: the worker's own
        measurement."""
        rows, computing = [len(each.tokens) for each in wanted], times.computing
        self.experts += len(rows)
        if max(rows) > FLAT:
            self.row = self._mean(self.row, computing / sum(rows))
        else:
            self.expert = self._mean(self.expert, computing / len(rows))
            hop = self.hop if queued else max(0.0, whole - times.whole)
            self.hop = hop if hop < self.hop else self._mean(self.hop, hop)
        if times.loads:
            self.load = self._mean(self.load, times.loading / times.loads)
        self.row = self.row or self.expert / FLAT
        self.has_answered = True

    def _mean(self, before: float, now: float) -> float:
        return now if before == 0.0 else (1 - _WEIGHT) * before + _WEIGHT * now


def deadline(expected: float) -> float:
    """Return the seconds after which a request counts as late and is sent to other machines. `expected`: the seconds
    that the request should take."""
    return min(_MOST_DEADLINE, max(_LEAST_DEADLINE, _DEADLINE_FACTOR * expected))
