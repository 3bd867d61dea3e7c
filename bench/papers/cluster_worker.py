"""A worker of a simulated cluster: one load after the other, a few slots, one expert computed at a time.

What main asks for goes before what was merely named ahead. An expert that was named stays until main has asked for its
layer, in whichever way; what has been computed may be overwritten.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

from smoe.expert import ExpertKey
from smoe.simulator.cluster_machine import WorkerTimes
from smoe.simulator.events import Events


class _Request:
    def __init__(self, keys: Sequence[ExpertKey], answer: Callable[[], None]) -> None:
        self.left = list(keys)
        self.answer = answer


class SimulatedWorker:
    """Steps number the layers of all tokens in their order: token * L + layer."""

    def __init__(self, events: Events, times: WorkerTimes) -> None:
        self.times = times
        self.loads: list[tuple[float, float]] = []
        """(begin, end) of every load, ascending; of one given up, until then."""
        self.computing: list[tuple[float, float]] = []
        self.most_held = 0
        self.asked_loads = 0
        """Begun when main had asked for the expert."""
        self._events = events
        self._held: OrderedDict[ExpertKey, bool] = OrderedDict()
        """Whether it is there; least recently used first."""
        self._named: dict[ExpertKey, int] = {}
        """The step for which each expert in a slot was named and that main has not come to yet."""
        self._expected: deque[tuple[int, ExpertKey]] = deque()
        """Named, not begun."""
        self._requests: list[_Request] = []
        self._loading: tuple[ExpertKey, float] | None = None
        """(which, when it began)."""
        self._load_number = 0
        self._is_computing = False
        self._step = -1
        """That main asked for last."""

    def holds(self, step: int) -> set[ExpertKey]:
        """Whether experts are in its slots, on their way there, or expected for that step or one before."""
        return {*self._held, *(key for at, key in self._expected if at <= step)}

    def name(self, step: int, keys: Sequence[ExpertKey]) -> None:
        """These are announced; of no use once they are requested."""
        if step <= self._step:
            return
        self._expected.extend((step, key) for key in keys)
        self._go_on()

    def unname(self, step: int) -> None:
        """Drop the expectations from that step on."""
        self._expected = deque(each for each in self._expected if each[0] < step)
        self._named = {key: at for key, at in self._named.items() if at < step}
        self._give_up()
        self._go_on()

    def ask(self, step: int, keys: Sequence[ExpertKey], answer: Callable[[], None]) -> None:
        """Main wants these computed, and nothing else of this step; `answer` when all are."""
        self._step = max(self._step, step)
        self._expected = deque(each for each in self._expected if each[0] > step)
        self._named = {key: at for key, at in self._named.items() if at > step}
        if keys:
            self._requests.append(_Request(keys, answer))
        self._give_up()
        self._go_on()

    def _give_up(self) -> None:
        """End the load in flight, if it is not needed, at the end of its chunk."""
        if self._loading is None or self.times.chunk is None or self._is_wanted(self._loading[0]):
            return
        key, begin = self._loading
        done = ceil((self._events.now - begin) / self.times.chunk - 1e-9)
        end = max(self._events.now, begin + done * self.times.chunk)
        if end < begin + self.times.load:
            self._end_at(end, key, is_whole=False)

    def _is_wanted(self, key: ExpertKey) -> bool:
        return key in self._named or any(key in request.left for request in self._requests)

    def _go_on(self) -> None:
        if self._loading is None:
            self._load_next()
        if not self._is_computing:
            self._compute_next()

    def _load_next(self) -> None:
        asked = next((key for request in self._requests for key in request.left if key not in self._held), None)
        key, step = (asked, None) if asked is not None else self._next_expected()
        if key is None or not self._make_room(for_coordinator=asked is not None):
            return
        if step is None:
            self.asked_loads += 1
        else:
            self._expected.popleft()
            self._named[key] = step
        self._held[key] = False
        self.most_held = max(self.most_held, len(self._held))
        self._loading = (key, self._events.now)
        self._end_at(self._events.now + self.times.load, key, is_whole=True)

    def _next_expected(self) -> tuple[ExpertKey | None, int | None]:
        while self._expected:
            step, key = self._expected[0]
            if key not in self._held:
                return key, step
            self._expected.popleft()
            self._named[key] = step
        return None, None

    def _make_room(self, for_coordinator: bool) -> bool:
        """Whether a slot is free now; for main, what was named for later gives way, too."""
        if len(self._held) < self.times.slots:
            return True
        wanted = {key for request in self._requests for key in request.left}
        free = [key for key in self._held if key not in wanted]
        if not for_coordinator:
            free = [key for key in free if key not in self._named]
        if not free:
            return False
        victim = min(free, key=lambda key: key in self._named)  # the least recently used of them
        del self._held[victim]
        self._named.pop(victim, None)
        return True

    def _end_at(self, end: float, key: ExpertKey, is_whole: bool) -> None:
        self._load_number += 1
        self._events.at(end, partial(self._loaded, self._load_number, key, is_whole))

    def _loaded(self, number: int, key: ExpertKey, is_whole: bool) -> None:
        if number != self._load_number or self._loading is None:
            return  # it was given up
        self.loads.append((self._loading[1], self._events.now))
        self._loading = None
        if is_whole:
            self._held[key] = True
        else:
            del self._held[key]
        self._go_on()

    def _compute_next(self) -> None:
        for request in self._requests:
            for key in request.left:
                if self._held.get(key):
                    self._is_computing = True
                    self._held.move_to_end(key)
                    begin, end = self._events.now, self._events.now + self.times.expert
                    self.computing.append((begin, end))
                    self._events.at(end, partial(self._computed, request, key))
                    return

    def _computed(self, request: _Request, key: ExpertKey) -> None:
        self._is_computing = False
        request.left.remove(key)
        if not request.left:
            self._requests.remove(request)
            request.answer()
        self._go_on()
