"""What an engine does, noted for open pages: what befalls each expert, and the moment of every pass.

    engine's thread   routed | planned --> note ......... | routed | planned --> note ...
    page                               ^ `taken`, some times a second, counts (`report/watched.py`)

Experts are noted by numbers that run through all layers, in queues that either thread may touch at any time: nothing of
a plan is stored, so what the engine throws away stays young, and collecting garbage costs it nothing more. Some 2 us a
layer; without pages the engine takes no notes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

from smoe.expert import ExpertKey
from smoe.metrics import Counters
from smoe.policy.plan import DEVICE, FIRST_WORKER, LayerPlan
from smoe.policy.step import Decision
from smoe.routing import Phase, Routing
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.observer import StepObserver
from smoe.runtime.step import Step

EVENTS = ("decoded", "read", "used", "replaced", "right", "wrong", "by_cpu", "by_worker")
"""What befalls an expert: a decode step, or another one, used it; a load began, asked for or guessed; a route of its
was served by another expert or dropped; it was prefetched and used, or not; the CPU, or a worker,
computed it."""
_MOST = 1 << 17
"""Beyond so many of a kind the oldest are dropped: no page has looked for some hundred tokens."""


class PassNote(NamedTuple):
    """A pass has reached its first layer."""

    now: float
    """On the engine's clock."""
    phase: Phase
    tokens: int
    """Rows that ask for experts."""
    counters: Counters
    bytes_read: int


class Watch(StepObserver):
    """Notes on one engine. `begin`, `taken` and `end` may be called by one thread in addition to the engine's."""

    def __init__(self, executor: LayerExecutor, first: Mapping[int, int]) -> None:
        """`first`: the number of each layer's first expert."""
        self._executor = executor
        self._first = first
        self._entry = min(first)
        self._events = {name: deque[int](maxlen=_MOST) for name in EVENTS}
        self._passes: deque[PassNote] = deque(maxlen=_MOST)
        self._staged: frozenset[ExpertKey] = frozenset()
        """Copies in staging slots when the layer's router had been observed; what is dropped then was guessed wrong."""
        self._known: frozenset[ExpertKey] = frozenset()
        """Of these, what was there before."""

    def begin(self) -> None:
        """A page is open."""
        self.taken()
        self._staged = self._known = frozenset()
        self._executor.observers = [*self._executor.observers, self]  # another list: the engine may go through the old

    def end(self) -> None:
        """The last page has closed."""
        self._executor.observers = [each for each in self._executor.observers if each is not self]

    def taken(self) -> tuple[dict[str, list[int]], list[PassNote]]:
        """All since the last time, the oldest first: by kind the experts, layer after layer; and the passes."""
        return {name: _drained(queue) for name, queue in self._events.items()}, _drained(self._passes)

    def routed(self, step: Step) -> None:
        self._staged = frozenset(self._executor.table.staged)

    def planned(self, routing: Routing, decision: Decision) -> None:
        if routing.layer == self._entry:
            self._note_pass(routing)
        plan, first, events = decision.plan, self._first[routing.layer], self._events
        used = "decoded" if routing.phase is Phase.DECODE else "used"
        events[used].extend([first + serve.key[1] for serve in plan.serves])
        if plan.loads:
            events["read"].extend([first + load.key[1] for load in plan.loads])
        if self._executor.compute.units:
            self._note_units(plan, first)
        if decision.routing.top_k_index is not routing.top_k_index:
            for chosen, got in zip(routing.top_k_index, decision.routing.top_k_index, strict=True):
                events["replaced"].extend([first + a for a, b in zip(chosen, got, strict=True) if a != b])
        if self._staged:
            self._note_guesses(plan)
        else:
            self._known = self._staged

    def _note_pass(self, routing: Routing) -> None:
        executor, none = self._executor, routing.experts
        tokens = sum(min(chosen) != none for chosen in routing.top_k_index)
        read = executor.arrivals.transfers.bytes_read
        self._passes.append(PassNote(executor.now(), routing.phase, tokens, copy(executor.counters), read))

    def _note_units(self, plan: LayerPlan, first: int) -> None:
        for serve in plan.serves:
            if serve.unit != DEVICE:
                self._events["by_cpu" if serve.unit < FIRST_WORKER else "by_worker"].append(first + serve.key[1])

    def _note_guesses(self, plan: LayerPlan) -> None:
        """What has begun to be prefetched, what of it is wanted now, and what has just been dropped."""
        staged, here = self._staged, self._executor.table.staged
        right = [serve.key for serve in plan.serves if serve.key in staged]
        wrong = [key for key in staged if key not in here]
        begun = [key for key in staged if key not in self._known]
        for name, keys in (("read", begun), ("right", right), ("wrong", wrong)):
            self._events[name].extend([self._first[key[0]] + key[1] for key in keys])
        self._known = staged.intersection(here).difference(right)
        self._staged = frozenset()


def _drained(queue: deque) -> list:  # type: ignore[type-arg]
    return [queue.popleft() for _ in range(len(queue))]
