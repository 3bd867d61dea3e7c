"""Simulates a machine that computes experts, as `compute/host_experts.py` and `memory/host.py` do on hardware.

    announced    | a ........ |          | b ........ |        one thread reads announced experts,
    requested    |            | c ...... |            | d ...  one reads requested experts; both use one disk;
    computing                            | c |                 one computes requested experts in their order

Time goes to the right; a, b, c and d are experts. The coordinator announces experts that will probably be needed, and
requests experts that it needs. A requested expert stays in its slot until it is computed. An announced expert stays as
long as other experts can be evicted. The least recently used expert is evicted first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from smoe.expert import ExpertKey
from smoe.simulator.events import Events, Resource


@dataclass(frozen=True)
class WorkerTimes:
    """The times of a worker in seconds, and its number of slots."""

    load: float
    """Seconds to load one expert into a slot."""
    expert: float
    """Seconds to compute one expert for one row (token)."""
    slots: int = 1
    away: float = 0.0
    """Seconds that a message to the worker takes in one direction, in addition to `Wire.delay`."""
    chunk: float | None = None
    """Seconds to read one chunk of an expert. A load that is no longer needed stops after the current chunk. None: such
    a load is completed."""


class SimulatedRequest:
    """A request of the coordinator for several experts. It counts the experts that are not computed yet."""

    def __init__(self, keys: Sequence[ExpertKey], answer: Callable[[SimulatedRequest], None], arrived: float) -> None:
        self.left = len(keys)
        self.experts = len(keys)
        self.arrived = arrived
        self.loads = 0
        """The number of experts that were loaded for this request."""
        self.answer = answer


class SimulatedMachine:
    """A machine that loads and computes experts: a worker or the coordinator."""

    def __init__(self, events: Events, times: WorkerTimes) -> None:
        self.times = times
        self.disk = Resource(events)
        self.loads: list[float] = []
        """The times at which the loads began, in seconds."""
        self._events = events
        self._slots: OrderedDict[ExpertKey, bool] = OrderedDict()
        """For each expert in a slot or in flight, whether it is completely loaded; the least recently used first."""
        self._pinned: Counter[ExpertKey] = Counter()
        """How often each expert is in flight or waits to be computed. It cannot be evicted meanwhile."""
        self._expected: set[ExpertKey] = set()
        self._announced: deque[tuple[ExpertKey, SimulatedRequest | None]] = deque()
        self._asked: deque[tuple[ExpertKey, SimulatedRequest | None]] = deque()
        self._is_reading = {True: False, False: False}
        """Whether each of the two reading threads is reading: True is the one for requested experts. Each reads one at
        a time."""
        self._to_compute: deque[tuple[ExpertKey, SimulatedRequest]] = deque()
        self._ready: set[tuple[ExpertKey, int]] = set()
        """(expert, identity of the request) of requested experts that are in memory and wait to be computed."""
        self._is_computing = False

    def __contains__(self, key: object) -> bool:
        """Return whether an expert is in a slot or in flight."""
        return key in self._slots

    @property
    def under_way(self) -> float:
        """The number of loads that have not ended. A load that is running counts as a fraction: the part that is still
        to be read."""
        left = (self.disk.free - self._events.now) / self.times.load if self.times.load else 0.0
        return max(0.0, left) + sum(key not in self._slots for key, _ in self._asked)

    @property
    def brought_at(self) -> float:
        """The time at which the last load began; minus infinity before the first."""
        return self.loads[-1] if self.loads else -inf

    def begin_with(self, keys: Sequence[ExpertKey]) -> None:
        """Fill the slots with as many of the experts `keys` as fit. The experts are in the order of their last use, the
        latest at the end."""
        self._slots.update(dict.fromkeys(keys[-self.times.slots :], True))

    def announce(self, keys: Sequence[ExpertKey]) -> None:
        """Announce experts, in place of the experts announced before. Announced experts are evicted last, and loaded if
        they are missing."""
        self._expected = set(keys)
        self._announced.extend((key, None) for key in keys if key not in self._slots)
        self._go_on()

    def ask(self, keys: Sequence[ExpertKey], answer: Callable[[SimulatedRequest], None]) -> None:
        """Request experts. `answer` is called with the request when all requested experts are computed."""
        request = SimulatedRequest(keys, answer, self._events.now)
        order = sorted(keys, key=lambda key: key not in self._slots)
        self._asked.extend((key, request) for key in order)
        self._to_compute.extend((key, request) for key in order)
        self._go_on()

    def _go_on(self) -> None:
        for for_coordinator in (True, False):
            while not self._is_reading[for_coordinator] and self._read_next(for_coordinator):
                pass
        self._compute_next()

    def _read_next(self, for_coordinator: bool) -> bool:
        """Process the next entry of the queue of requested (`for_main`) or announced experts. Return False if the queue
        is empty or the entry has to wait."""
        queue = self._asked if for_coordinator else self._announced
        if not queue:
            return False
        key, request = queue[0]
        if request is None and key not in self._expected:
            queue.popleft()  # no longer needed
            return True
        if self._slots.get(key) is False or (key not in self._slots and not self._make_room()):
            return False  # the other reader is loading it, or every slot is pinned
        queue.popleft()
        if key in self._slots:
            self._slots.move_to_end(key)
            if request is not None:
                self._keep(key, request)
            return True
        self._slots[key] = False
        self._pinned[key] += 1
        self._is_reading[for_coordinator] = True
        self.loads.append(max(self._events.now, self.disk.free))
        if request is not None:
            request.loads += 1
        self._events.at(self.disk.use(self.times.load), partial(self._has_read, key, request))
        return True

    def _keep(self, key: ExpertKey, request: SimulatedRequest) -> None:
        self._pinned[key] += 1
        self._ready.add((key, id(request)))

    def _let_go(self, key: ExpertKey) -> None:
        self._pinned[key] -= 1
        if not self._pinned[key]:
            del self._pinned[key]

    def _make_room(self) -> bool:
        if len(self._slots) < self.times.slots:
            return True
        free = [key for key in self._slots if key not in self._pinned]
        victim = next((key for key in free if key not in self._expected), next(iter(free), None))
        if victim is not None:
            del self._slots[victim]
        return victim is not None

    def _has_read(self, key: ExpertKey, request: SimulatedRequest | None) -> None:
        self._slots[key] = True
        self._is_reading[request is not None] = False
        if request is not None:
            self._keep(key, request)
        self._let_go(key)
        self._go_on()

    def _compute_next(self) -> None:
        if self._is_computing or not self._to_compute:
            return
        key, request = self._to_compute[0]
        if (key, id(request)) in self._ready:
            self._to_compute.popleft()
            self._is_computing = True
            self._events.at(self._events.now + self.times.expert, partial(self._computed, key, request))

    def _computed(self, key: ExpertKey, request: SimulatedRequest) -> None:
        self._is_computing = False
        self._ready.discard((key, id(request)))
        self._let_go(key)
        self._expected.discard(key)
        request.left -= 1
        if not request.left:
            request.answer(request)
        self._go_on()
