"""Decides which machine of a cluster loads and holds which expert, before the layers' routers have run.

`AheadSchedule` receives three events, and sends each worker a list of the experts that the worker should hold:

    expect      a draft model or a predictor has predicted experts of later layers, of this token and the next
    asked       a layer's router has chosen its experts
    answered    a worker has computed experts

An expert stays in a machine's memory as long as experts that are needed sooner leave a slot for it. A missing expert is
loaded as late as possible. It takes the slot of the predicted expert that is needed last, and only if that expert is
needed later than the missing one: Belady's rule, with a draft model's predictions as the future.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from typing import Any, NamedTuple

from smoe.expert import EXACT, ExpertKey
from smoe.policy.placement import WorkerView, by_turns
from smoe.policy.plan import DEVICE

_EARLY = 1.5
"""A load starts this many load durations before the expert is needed."""
_WEIGHT = 0.02
"""The weight of a new measurement in the decaying mean of a layer's seconds, if the measurement exceeds the mean. A
measurement below the mean replaces the mean."""


class TokenLayer(NamedTuple):
    """One layer of one token. The experts of this layer are needed together, so they are scheduled together."""

    position: int
    """The token's position in its text."""
    layer: int


class Here(NamedTuple):
    """The coordinator's own costs and capacity. The schedule treats the coordinator as one of the machines that load
    experts."""

    load: Callable[[], float]
    """Returns the seconds that the coordinator takes to load an expert."""
    retained: Callable[[], float]
    """Returns the fraction of the experts computed by the coordinator that were in its memory already."""
    is_at_hand: Callable[[ExpertKey], bool]
    """Returns whether the coordinator has an expert in memory or is loading it."""
    room: int
    """The number of experts that the coordinator can load before they are needed."""


class AheadSchedule:
    """Assigns the predicted experts of the current and the next token to the machines of a cluster. Any thread may call
    it if `lock` is a real lock."""

    def __init__(
        self,
        method: str,
        turns: Mapping[int, int],
        spares: int,
        here: Here,
        costs_later: Callable[[], float],
        tell: Callable[[int, list[ExpertKey]], None],
        clock: Callable[[], float],
        lock: AbstractContextManager[Any],
    ) -> None:
        """`method`: one of `PLACEMENT`. `turns`: for each layer with experts, its number among these layers. `spares`:
        the number of experts that a prediction has in addition to the layer's top-k. `costs_later`: returns the seconds
        by which a load by the coordinator is worse than its duration (`Placement`). `tell`: sends a worker the list of
        experts that it should hold, ordered by when they are needed. `clock`: returns seconds, of the same clock as
        `WorkerView.brought_at`. `lock`: held during every change."""
        self._method = method
        self._turns = turns
        self._spares = spares
        self._here = here
        self._costs_later = costs_later
        self._tell = tell
        self._clock, self._lock = clock, lock
        self._now = TokenLayer(-1, -1)
        """The layer that the current token has reached."""
        self._views: Callable[[], Sequence[WorkerView]] = tuple
        self._slots: Mapping[int, int] = {}
        self._expected: dict[TokenLayer, tuple[int, ...]] = {}
        """Predicted experts, best first, of layers whose routers have not run."""
        self._groups: dict[TokenLayer, dict[ExpertKey, int]] = {}
        """With round-robin placement: for each layer, the worker that computes each expert."""
        self._asked: dict[ExpertKey, int] = {}
        """The experts that the last router chose and that are not computed yet, each with the machine assigned to
        it."""
        self._assigned: dict[ExpertKey, int] = {}
        """The machine to which each expert was assigned last. An expert is assigned to the coordinator only if it
        should be loaded there."""
        self._free_at: dict[int, float] = {}
        """The time at which each worker will have loaded all experts assigned to it."""
        self._is_short = False
        """Whether an expert should be loaded and no machine has a slot for it."""
        self._layer_seconds = 0.0
        self._asked_at = 0.0
        self._horizon = inf
        """How many seconds before a layer runs the loads of its experts may start: `_EARLY` times the slowest load, and
        the time of a message."""

    def begin(self, position: int, views: Callable[[], Sequence[WorkerView]], slots: Mapping[int, int]) -> None:
        """Start a forward pass at `position` of the text. `views` returns the workers' present states; `slots` is the
        number of slots of each worker. Predictions for positions other than this one and the next are dropped."""
        with self._lock:
            self._now, self._views = TokenLayer(position, -1), views
            self._asked_at = 0.0
            self._asked.clear()
            if slots != self._slots:
                self._slots = dict(slots)
                self._assigned.clear()
                self._groups.clear()
            self._forget([place for place in self._expected if not 0 <= place.position - position <= 1])
            self._go_on()

    def place(self, layer: int, is_next: bool) -> TokenLayer:
        """Return the `TokenLayer` for a layer of the current token or, if `is_next`, of the next token."""
        return TokenLayer(self._now.position + is_next, layer)

    def turn(self, place: TokenLayer) -> int:
        """Return the number of a token's layer in the order in which layers run. The numbers count layers with experts
        only and continue from token to token. Groups of workers compute the layers in turn, by this number."""
        return place.position * len(self._turns) + self._turns.get(place.layer, -1)

    def expect(self, places: Mapping[TokenLayer, Sequence[int]]) -> None:
        """Replace the predictions for these layers by the given experts, best first. Layers that have already run are
        ignored."""
        with self._lock:
            is_new = False
            for place, experts in places.items():
                if place.layer in self._turns and place > self._now and self._expected.get(place) != tuple(experts):
                    self._expected[place] = tuple(experts)
                    self._groups.pop(place, None)
                    is_new |= self._is_near(place)
            if is_new:
                self._go_on()

    def withdraw(self, position: int) -> None:
        """Drop the predictions for this position and later ones, because the text from this position on is another one
        than predicted."""
        with self._lock:
            self._forget([place for place in self._expected if place.position >= position])

    def asked(self, layer: int, chosen: Collection[int]) -> None:
        """Record the experts that a layer's router has chosen. They stay in the machines that have them until they are
        computed."""
        with self._lock:
            self._note_pace()
            self._now = self._now._replace(layer=layer)
            keys = [(layer, expert, EXACT) for expert in chosen]
            self._asked = {key: self._assigned[key] for key in keys if key in self._assigned}
            self._assigned = {key: unit for key, unit in self._assigned.items() if unit != DEVICE or key[0] != layer}
            self._forget([place for place in self._expected if place <= self._now])
            self._go_on()

    def answered(self, unit: int, keys: Iterable[ExpertKey]) -> None:
        """Record that worker `unit` has computed the experts `keys`."""
        with self._lock:
            done = [key for key in keys if self._asked.get(key) == unit]
            for key in done:
                del self._asked[key]
            if done and self._is_short:
                self._go_on()

    def here(self, layer: int) -> list[int]:
        """Return the experts of this layer of the current token that the coordinator should load itself."""
        with self._lock:
            return [key[1] for key, unit in self._assigned.items() if unit == DEVICE and key[0] == layer]

    # -- the caller holds the lock -------------------------------------------------------------------------------------

    def _forget(self, places: Iterable[TokenLayer]) -> None:
        for place in places:
            self._expected.pop(place, None)
            self._groups.pop(place, None)

    def _note_pace(self) -> None:
        """Update the usual seconds of a layer when a layer's router has chosen. A layer that took longer than usual
        counts little, since it may have waited for loads. The time between two tokens does not count."""
        now = self._clock()
        if self._asked_at:
            took = now - self._asked_at
            is_first = not self._layer_seconds or took < self._layer_seconds
            self._layer_seconds += (1.0 if is_first else _WEIGHT) * (took - self._layer_seconds)
        self._asked_at = now

    def _is_near(self, place: TokenLayer) -> bool:
        """Return whether loads for this layer may start now. They always may for the next layer."""
        steps = self.turn(place) - self.turn(self._now) - 1
        return self._method == "round-robin" or self._layer_seconds * steps <= self._horizon

    def _go_on(self) -> None:
        """Assign the slots of all machines again. Send each machine that should load another expert its new list of
        experts."""
        views = {view.unit: view for view in self._views()}
        if not views:
            return
        shelves = {unit: _Shelf(size) for unit, size in self._slots.items() if unit in views}
        shelves[DEVICE] = _Shelf(self._here.room)
        for key, whose in self._asked.items():
            if whose in shelves:
                shelves[whose].taken.append(key)
        missing = [each for place in sorted(self._expected) for each in self._reserve(place, views, shelves)]
        self._horizon = _EARLY * max(self._here.load(), *(view.load for view in views.values()))
        self._horizon += max(view.hop for view in views.values())
        self._is_short, news = False, set[int]()
        for place, key, group in missing:
            if not self._is_near(place):
                break
            unit = group if group is not None else self._first(place, views, shelves)
            if unit is None or unit not in shelves or shelves[unit].gives_up(self.turn(place)) is None:
                self._is_short = True
                continue
            shelves[unit].take(key)
            self._note_load(unit, views)
            news.add(unit)
        for unit_to_inform in news:
            self._assigned = {key: whose for key, whose in self._assigned.items() if whose != unit_to_inform}
            self._assigned |= dict.fromkeys(shelves[unit_to_inform].keys, unit_to_inform)
            if unit_to_inform != DEVICE:
                self._tell(unit_to_inform, shelves[unit_to_inform].keys)

    def _reserve(
        self, place: TokenLayer, views: Mapping[int, WorkerView], shelves: Mapping[int, _Shelf]
    ) -> Iterator[tuple[TokenLayer, ExpertKey, int | None]]:
        """Reserve slots for those of the layer's predicted experts that some machine already holds. Yield the other
        predicted experts as (layer, expert, worker). The worker is given with round-robin placement only; otherwise it
        is None."""
        keys = [(place.layer, expert, EXACT) for expert in self._expected[place]]
        groups: Mapping[ExpertKey, int] = {}
        if self._method == "round-robin":
            if place not in self._groups:
                every = list(views.values())
                self._groups[place] = by_turns(keys, len(keys) - self._spares, self.turn(place), every)
            groups = self._groups[place]
        for key in keys:
            group = groups.get(key)
            holder = self._holder(key, views) if group is None else group if self._has(group, key, views) else None
            if holder is not None and holder in shelves:
                shelves[holder].hold(self.turn(place), key)
            elif group is not None or not self._here.is_at_hand(key):
                yield place, key, group

    def _holder(self, key: ExpertKey, views: Mapping[int, WorkerView]) -> int | None:
        """Return the machine, a worker or the coordinator, that has an expert in memory or is loading it; None if there
        is no such machine."""
        unit_to_inform = self._assigned.get(key)
        if unit_to_inform is not None and (unit_to_inform in views or unit_to_inform == DEVICE):
            return unit_to_inform
        return next((unit for unit, view in views.items() if key in view.holds), None)

    def _has(self, unit: int, key: ExpertKey, views: Mapping[int, WorkerView]) -> bool:
        return unit in views and (self._assigned.get(key) == unit or key in views[unit].holds)

    def _first(self, place: TokenLayer, views: Mapping[int, WorkerView], shelves: Mapping[int, _Shelf]) -> int | None:
        """Return the machine that should load an expert of this layer now; None if it is too early for all machines.

        Of the workers that would finish in time, the one is chosen whose evicted expert is needed last (a free slot
        counts as an expert that is never needed). If no worker would finish in time, the machine that finishes first is
        chosen. A worker that is still reading other experts is considered for the next layer only.
        """
        turn, now = self.turn(place), self._clock()
        left = self._layer_seconds * (turn - self.turn(self._now))
        soon = left - self._layer_seconds  # time until the next layer is requested
        ends, gives_up = dict[int, float](), dict[int, float]()
        for unit, view in views.items():
            busy = max(0.0, self._free_at.get(unit, now) - now)
            if soon > view.hop + _EARLY * view.load or (soon > 0 and busy > self._layer_seconds):
                continue
            given = shelves[unit].gives_up(turn)
            if given is not None:
                ends[unit], gives_up[unit] = view.hop + busy + view.load, given
        in_time = [unit for unit, end in ends.items() if end <= left]
        if in_time:
            return max(in_time, key=lambda unit: (gives_up[unit], -views[unit].brought_at, -ends[unit]))
        waiting, load = len(shelves[DEVICE].taken), self._here.load()
        if place.position == self._now.position and waiting < self._here.room and soon <= _EARLY * load:
            ends[DEVICE] = (1 + waiting) * load + self._costs_later()
        return min(ends, key=lambda unit: ends[unit], default=None)

    def _note_load(self, unit: int, views: Mapping[int, WorkerView]) -> None:
        if unit in views:
            now = self._clock()
            self._free_at[unit] = max(now, self._free_at.get(unit, now)) + views[unit].load


class _Shelf:
    """The slots of one machine while `AheadSchedule` assigns them: which expert each slot will have."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.taken: list[ExpertKey] = []
        """Experts that the machine is about to compute or should load. They cannot be evicted."""
        self._held: dict[ExpertKey, float] = {}
        """Experts in the machine's memory that are predicted, each with the number of its layer (`AheadSchedule.turn`),
        those needed first in front."""

    @property
    def keys(self) -> list[ExpertKey]:
        return [*self.taken, *self._held][: self._size]

    def hold(self, turn: float, key: ExpertKey) -> None:
        """Reserve a slot for an expert in memory that layer number `turn` needs. If the expert has a reserved slot
        already, nothing changes."""
        if key not in self.taken:
            self._held.setdefault(key, turn)

    def gives_up(self, turn: float) -> float | None:
        """Return how late the expert is needed that would be evicted by a new load for layer number `turn`: the number
        of the layer that needs it. Return infinity if a slot is free, and None if all experts in the slots are needed
        at least as early as the new one."""
        if len(self.taken) + len(self._held) < self._size:
            return inf
        if not self._held or len(self.taken) >= self._size:
            return None
        last = next(reversed(self._held.values()))
        return last if last > turn else None

    def take(self, key: ExpertKey) -> None:
        """Assign a slot to an expert that is to be loaded. If no slot is free, the expert in memory that is needed last
        loses its slot."""
        if len(self.taken) + len(self._held) >= self._size:
            self._held.popitem()
        self.taken.append(key)
