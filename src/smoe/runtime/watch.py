"""Records what happens to each expert and the start of every pass, for open pages of `/watch`.

The engine's thread writes notes into queues, and a page's thread empties them. Time to the right; `routed` and
`planned` are the observer's callbacks:

    engine's thread   routed | planned -> note ......... | routed | planned -> note ...
    page's thread                  `taken`, several times a second: counts the notes (`report/watched.py`)

Experts have numbers that run through all layers. Either thread may use the queues at any time. No object of a plan is
stored, so the engine's temporary objects stay short-lived, and garbage collection costs nothing more. Notes cost some 2
us for each layer; without an open page there are none.
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
"""The kinds of events of an expert. In this order: used in a decode step; its load has begun; used in a prefill; its
route replaced or dropped; prefetched and used; prefetched and not used; computed by the CPU; computed by a worker."""
_MOST = 1 << 17
"""The maximum number of stored events of a kind. If no page takes the events for some hundred tokens, the oldest are
dropped."""


class PassNote(NamedTuple):
    """The state of the engine when a pass reaches its first layer."""

    now: float
    """The time on the engine's clock, in seconds."""
    phase: Phase
    tokens: int
    """The number of rows that need experts."""
    counters: Counters
    bytes_read: int


class Watch(StepObserver):
    """The events that a browser page shows for one engine. In addition to the engine's thread, one other thread may
    call `begin`, `taken` and `end`."""

    def __init__(self, executor: LayerExecutor, first: Mapping[int, int]) -> None:
        """`first`: for each layer, the number of its first expert. Expert numbers run through all layers."""
        self._executor = executor
        self._first = first
        self._entry = min(first)
        self._events = {name: deque[int](maxlen=_MOST) for name in EVENTS}
        self._passes: deque[PassNote] = deque(maxlen=_MOST)
        self._staged: frozenset[ExpertKey] = frozenset()
        """Copies in staging slots when the layer's router was observed; those dropped afterwards were wrong
        predictions."""
        self._known: frozenset[ExpertKey] = frozenset()
        """The staged copies that had been noted before."""

    def begin(self) -> None:
        """Start to record events, because a page of `/watch` is open."""
        self.taken()
        self._staged = self._known = frozenset()
        self._executor.add_observer(self)

    def end(self) -> None:
        """Stop recording events, because the last page of `/watch` was closed."""
        self._executor.remove_observer(self)

    def taken(self) -> tuple[dict[str, list[int]], list[PassNote]]:
        """Return all events since the last call, oldest first: lists of expert numbers by kind of event, and the notes
        on passes."""
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
        """Record prefetches that have begun, that this plan has used, and that were dropped without use."""
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
