"""The workers of a cluster as main knows them: who is there, what each holds, how long it takes.

    HELLO -> PROVING --bits equal--> READY --late, or silent--> SUSPECT --an answer, or a sign of life--> READY
                |                      |                             |
                `--other bits--------> OUT <--disconnected, silent, or late several times in a row

What a worker holds is worked out, not asked: it keeps what it used last, in as many slots as it has. Where that is
wrong, a time is forecast wrongly and nothing else.
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
from smoe.policy.balance import FLAT
from smoe.policy.placement import WorkerView

_WEIGHT = 0.2
"""The weight of the last measurement in a moving average."""
_LEAST_DEADLINE, _MOST_DEADLINE = 0.025, 30.0
_DEADLINE_FACTOR = 3.0
_UNKNOWN_SECONDS = 2.0
"""Expected of a request while nothing has been measured."""
_LATE_USES = 512
"""After so many what was counted before counts half."""


class Loss(NamedTuple):
    """A worker that was there, and was not any more."""

    name: str
    why: str
    at: float
    """Seconds since 1970."""


class WorkerTotals(NamedTuple):
    """What a worker has done, proofs left out."""

    experts: int = 0
    """Computed;"""
    checked: int = 0
    """of them, recomputed by main."""
    requests: int = 0
    missed: int = 0
    """Deadlines."""

    def plus(self, other: WorkerTotals) -> WorkerTotals:
        """Both together."""
        return WorkerTotals(*map(sum, zip(self, other, strict=True)))


NOTHING = WorkerTotals()


class WorkerState(Enum):
    """Where a worker stands."""

    PROVING = "is being checked"
    READY = "ready"
    SUSPECT = "late"
    OUT = "out"


@dataclass
class Member:
    """One worker. The link's thread changes its state and its times, the computing thread what it holds."""

    unit: int
    """Its number in plans."""
    name: str
    key: str
    """Its public key."""
    route: bytes
    """Where ZeroMQ finds it."""
    slots: int
    state: WorkerState = WorkerState.PROVING
    last_seen: float = 0.0
    """When its last message came (`time.monotonic`),"""
    answered: float = 0.0
    """gave results,"""
    late: float = 0.0
    """was found to be late."""
    why: str = ""
    """What put it out."""
    load: float = 0.0
    """Moving averages, seconds: of an expert brought in,"""
    expert: float = 0.0
    """of one computed for few rows,"""
    row: float = 0.0
    """of each of many rows,"""
    hop: float = 0.0
    """of there and back, for few rows."""
    experts: int = 0
    """Computed so far."""
    checked: int = 0
    """How many of them the coordinator has recomputed."""
    uses: int = 0
    """Experts asked for,"""
    brought: int = 0
    """and brought in, for that or ahead of it; both of late."""
    brought_at: float = -inf
    """When it was last to bring something in."""
    requests: int = 0
    missed: int = 0
    """Deadlines."""
    strikes: int = 0
    """How many of them since the last answer."""
    has_answered: bool = False
    has_proven: bool = False
    earlier: WorkerTotals = NOTHING
    """What it had done when it was here before."""
    most_rows: float = inf
    """The most rows of one expert that it computes: without torch, as many as its kernels have been tried with."""
    _holds: OrderedDict[ExpertKey, None] = field(default_factory=OrderedDict)
    _expected: set[ExpertKey] = field(default_factory=set)
    """It is to have these, and forgets others before them."""
    _late: set[ExpertKey] = field(default_factory=set)
    """Announced and not requested yet: perhaps loaded by now."""

    @property
    def is_here(self) -> bool:
        """Whether it may be asked: nothing speaks against it."""
        return self.state is WorkerState.READY

    def is_proven(self) -> None:
        """What it computes from now on is asked for by the text."""
        self.has_proven = True
        self.experts = self.requests = self.uses = self.brought = 0

    @property
    def done(self) -> WorkerTotals:
        """Whenever it was here."""
        now = (
            WorkerTotals(self.experts, self.checked, self.requests, self.missed) if self.has_proven else WorkerTotals()
        )
        return self.earlier.plus(now)

    def takes(self, wanted: Iterable[ExpertTask]) -> bool:
        """Whether it may be asked for these."""
        return self.is_here and max(len(each.tokens) for each in wanted) <= self.most_rows

    def view(self) -> WorkerView:
        """The member's values for plans."""
        return WorkerView(
            self.unit, self._holds, self.load, self.expert, self.row, self.hop, 0.0, self.brought_at, self.most_rows
        )

    def will_hold(self, keys: Iterable[ExpertKey]) -> int:
        """It is to have these; returns how many of them it has to bring in."""
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
        """It is asked to compute these; returns how many of them it has to bring in."""
        missing = self.will_hold(keys)
        if self.uses >= _LATE_USES:
            self.uses, self.brought = self.uses // 2, self.brought // 2
        self.uses, self.brought = self.uses + len(keys), self.brought + missing
        return missing

    def will_bring(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Announce these to it; returns those that it has to load."""
        missing = [key for key in keys if key not in self._holds]
        self._expected = set(keys)
        self.brought += self.will_hold(missing)
        self._late.update(missing)
        return missing

    def take_coming(self, keys: Iterable[ExpertKey]) -> int:
        """These are requested now; returns how many loads of announced experts may still come before them: their own,
        and one that is read ahead in parallel."""
        there = len(self._late & self._holds.keys())
        self._late.difference_update(keys)
        self._expected.difference_update(keys)
        left = len(self._late & self._holds.keys())
        return there - left + min(left, 1)

    def expected(self, wanted: Iterable[ExpertTask], loads: int) -> float:
        """Seconds that a request should take, with so many experts to bring in, where nothing is before it."""
        if not self.has_answered:
            return _UNKNOWN_SECONDS
        computing = sum(max(self.expert, len(each.tokens) * self.row) for each in wanted)
        return self.hop + loads * self.load + computing

    def note(self, wanted: Iterable[ExpertTask], whole: float, times: Times, queued: bool = False) -> None:
        """A request has been answered `whole` seconds after it was sent, `queued` while another was under way: that
        says nothing of the distance. `times` are the worker's."""
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
    """Seconds after which others are asked for what should be done in so many."""
    return min(_MOST_DEADLINE, max(_LEAST_DEADLINE, _DEADLINE_FACTOR * expected))
