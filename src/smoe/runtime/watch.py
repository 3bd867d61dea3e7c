"""What an engine does, noted for whoever looks: every layer that was planned, and the moment of every pass.

    engine's thread   routed | planned --> note ......... | routed | planned --> note ...
    whoever looks                      ^ `taken`, some times a second, counts (`report/watched.py`)

The engine's thread keeps references and counts nothing; while nobody looks it hears of nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

from smoe.expert import ExpertKey
from smoe.metrics import Counters
from smoe.policy.step import Decision
from smoe.routing import Phase, Routing
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.observer import Routed, StepObserver

MOST_NOTES = 1 << 14
"""Beyond so many the oldest are dropped: some 100 tokens that nobody has looked at."""


class LayerNote(NamedTuple):
    """One layer of one pass."""

    routing: Routing
    """The router's choice."""
    decision: Decision
    fetched: Sequence[ExpertKey]
    """What began to be prefetched since the layer before."""
    right: Sequence[ExpertKey]
    """Prefetched, and wanted now."""
    wrong: Sequence[ExpertKey]
    """Prefetched, and dropped now."""


class PassNote(NamedTuple):
    """A pass has reached its first layer."""

    now: float
    """On the engine's clock."""
    phase: Phase
    tokens: int
    """Rows that ask for experts."""
    counters: Counters
    bytes_read: int


Note = LayerNote | PassNote


class Watch(StepObserver):
    """Notes on one engine. `begin`, `taken` and `end` may be called by one thread beside the engine's."""

    def __init__(self, executor: LayerExecutor) -> None:
        self._executor = executor
        self._first = min(executor.compute.store.layers)
        self._notes: deque[Note] = deque(maxlen=MOST_NOTES)
        self._staged: frozenset[ExpertKey] = frozenset()
        """Copies in staging slots when the layer's router had been heard; what is dropped then was guessed wrong."""
        self._known: frozenset[ExpertKey] = frozenset()
        """Of these, what was there before."""

    def begin(self) -> None:
        """Somebody looks."""
        self._notes.clear()
        self._executor.observers = [*self._executor.observers, self]  # another list: the engine may go through the old

    def end(self) -> None:
        """Nobody looks any more."""
        self._executor.observers = [each for each in self._executor.observers if each is not self]

    def taken(self) -> list[Note]:
        """All notes since the last time, the oldest first."""
        notes, found = self._notes, list[Note]()
        while notes:
            found.append(notes.popleft())
        return found

    def routed(self, heard: Routed) -> None:
        self._staged = frozenset(self._executor.table.staged)

    def planned(self, routing: Routing, decision: Decision) -> None:
        if routing.layer == self._first:
            self._note_pass(routing)
        staged, known = self._staged, self._known
        if not staged:
            self._notes.append(LayerNote(routing, decision, (), (), ()))
            self._known = staged
            return
        here = self._executor.table.staged
        right = [serve.key for serve in decision.plan.serves if serve.key in staged]
        wrong = [key for key in staged if key not in here]
        self._notes.append(LayerNote(routing, decision, [key for key in staged if key not in known], right, wrong))
        self._known = staged.intersection(here).difference(right)
        self._staged = frozenset()

    def _note_pass(self, routing: Routing) -> None:
        executor, none = self._executor, routing.experts
        tokens = sum(min(chosen) != none for chosen in routing.top_k_index)
        read = executor.arrivals.transfers.bytes_read
        self._notes.append(PassNote(executor.now(), routing.phase, tokens, copy(executor.counters), read))
