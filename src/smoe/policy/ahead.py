"""What the machines of a cluster are to have before it is asked for: who keeps what, and who brings in what.

    shadow, predictor --expect--> what each layer of this token and the next will want, as far as it is known
    router            --asked-->  a layer is over, its experts are computed
    worker            --answered--> and done with
                          `--> of each worker's slots: what it computes, then what is wanted next, nearest first

A machine keeps an expert as long as nearer ones leave it a slot, and what is missing is loaded no earlier
than it has to be: so slots are given up by what is wanted last, as far as anybody can see (Belady's rule, with a shadow
for the future), and never for what is wanted later than that.
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
"""Times the seconds that it takes, an expert is brought in before it is wanted."""
_WEIGHT = 0.02
"""The weight of a slow layer in the usual time."""


class TokenLayer(NamedTuple):
    """A layer of a token."""

    position: int
    """The token's position in its text."""
    layer: int


class Here(NamedTuple):
    """Main's own part."""

    load: Callable[[], float]
    """Seconds that it takes to bring in an expert."""
    retained: Callable[[], float]
    """The share of its computed experts that it need not load."""
    is_at_hand: Callable[[ExpertKey], bool]
    """Whether it has one, or is loading it."""
    room: int
    """Experts that it can bring in ahead."""


class AheadSchedule:
    """Assigns the experts of the present token and the next one to machines. Any thread may call, as far as `lock` is
    one."""

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
        """`method`: one of `PLACEMENT`; `turns`: each layer's number among those with experts; `spares`: experts that
        predictions name in addition to those a layer chooses; `costs_later`: seconds by which a load by main is worse
        than it seems (`Placement`); `tell`: says to a worker what it is to have, nearest first; `clock`: in seconds, as
        workers' times are; `lock`: held while anything changes."""
        self._method = method
        self._turns = turns
        self._spares = spares
        self._here = here
        self._costs_later = costs_later
        self._tell = tell
        self._clock, self._lock = clock, lock
        self._now = TokenLayer(-1, -1)
        """Where the token under way is."""
        self._views: Callable[[], Sequence[WorkerView]] = tuple
        self._slots: Mapping[int, int] = {}
        self._expected: dict[TokenLayer, tuple[int, ...]] = {}
        """Experts, best first, of layers whose routers have not spoken."""
        self._groups: dict[TokenLayer, dict[ExpertKey, int]] = {}
        """Who is to have what, by turns."""
        self._asked: dict[ExpertKey, int] = {}
        """What the last layer's router has chosen, and who had it; until it has been computed."""
        self._assigned: dict[ExpertKey, int] = {}
        """The machine to which each expert was assigned last; the coordinator: to load it."""
        self._free_at: dict[int, float] = {}
        """When a worker has read everything that was announced."""
        self._is_short = False
        """Whether a machine is to load an expert and has no slot for it."""
        self._layer_seconds = 0.0
        self._asked_at = 0.0
        self._horizon = inf
        """Seconds: the slowest load of an expert."""

    def begin(self, position: int, views: Callable[[], Sequence[WorkerView]], slots: Mapping[int, int]) -> None:
        """A forward pass begins at this position, with these workers. Predictions for positions before it, or far
        from it, is forgotten."""
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
        """The place of a layer of the present token, or of the one after it."""
        return TokenLayer(self._now.position + is_next, layer)

    def turn(self, place: TokenLayer) -> int:
        """Which layer this is, counted over those with experts and on from token to token: groups of workers take turns
        in the same order wherever a token begins."""
        return place.position * len(self._turns) + self._turns.get(place.layer, -1)

    def expect(self, places: Mapping[TokenLayer, Sequence[int]]) -> None:
        """Expect these experts in these layers, best first, instead of earlier predictions."""
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
        """Predictions for this position and later ones belonged to another text."""
        with self._lock:
            self._forget([place for place in self._expected if place.position >= position])

    def asked(self, layer: int, chosen: Collection[int]) -> None:
        """A layer's router has spoken: who has what it has chosen keeps that until he has computed it."""
        with self._lock:
            self._note_pace()
            self._now = self._now._replace(layer=layer)
            keys = [(layer, expert, EXACT) for expert in chosen]
            self._asked = {key: self._assigned[key] for key in keys if key in self._assigned}
            self._assigned = {key: unit for key, unit in self._assigned.items() if unit != DEVICE or key[0] != layer}
            self._forget([place for place in self._expected if place <= self._now])
            self._go_on()

    def answered(self, unit: int, keys: Iterable[ExpertKey]) -> None:
        """A worker has computed these."""
        with self._lock:
            done = [key for key in keys if self._asked.get(key) == unit]
            for key in done:
                del self._asked[key]
            if done and self._is_short:
                self._go_on()

    def here(self, layer: int) -> list[int]:
        """The experts of a layer of the token under way that main is to bring in itself."""
        with self._lock:
            return [key[1] for key, unit in self._assigned.items() if unit == DEVICE and key[0] == layer]

    # -- with the lock ------------------------------------------------------------------------------------------------

    def _forget(self, places: Iterable[TokenLayer]) -> None:
        for place in places:
            self._expected.pop(place, None)
            self._groups.pop(place, None)

    def _note_pace(self) -> None:
        """How long a layer takes where nothing is waited for; of one token, as between two there is more."""
        now = self._clock()
        if self._asked_at:
            took = now - self._asked_at
            is_first = not self._layer_seconds or took < self._layer_seconds
            self._layer_seconds += (1.0 if is_first else _WEIGHT) * (took - self._layer_seconds)
        self._asked_at = now

    def _is_near(self, place: TokenLayer) -> bool:
        """Whether it may be time to bring its experts in: the next layer's always, as nothing is asked before it."""
        steps = self.turn(place) - self.turn(self._now) - 1
        return self._method == "round-robin" or self._layer_seconds * steps <= self._horizon

    def _go_on(self) -> None:
        """Divide all slots again, and inform machines that have to load something."""
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
        """Slots for what of a layer is there already; yields what is not, and who is to have it, by turns."""
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
        """Who has it or is bringing it in: a worker, or main."""
        unit_to_inform = self._assigned.get(key)
        if unit_to_inform is not None and (unit_to_inform in views or unit_to_inform == DEVICE):
            return unit_to_inform
        return next((unit for unit, view in views.items() if key in view.holds), None)

    def _has(self, unit: int, key: ExpertKey, views: Mapping[int, WorkerView]) -> bool:
        return unit in views and (self._assigned.get(key) == unit or key in views[unit].holds)

    def _first(self, place: TokenLayer, views: Mapping[int, WorkerView], shelves: Mapping[int, _Shelf]) -> int | None:
        """Who is to bring in an expert of this layer now, if it is time: of those who have it in time who gives up what
        is wanted last, else who has it first. Who reads something else already may wait, unless the next layer wants
        it: what is nearer then is unknown yet."""
        turn, now = self.turn(place), self._clock()
        left = self._layer_seconds * (turn - self.turn(self._now))
        soon = left - self._layer_seconds  # when the next layer has been asked for
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
    """A machine's slots, as they are given out."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.taken: list[ExpertKey] = []
        """What is computed, or to be brought in."""
        self._held: dict[ExpertKey, float] = {}
        """What is there and wanted, nearest first, and in which turn."""

    @property
    def keys(self) -> list[ExpertKey]:
        return [*self.taken, *self._held][: self._size]

    def hold(self, turn: float, key: ExpertKey) -> None:
        """It is there, and wanted then; of what is wanted twice the first time counts."""
        if key not in self.taken:
            self._held.setdefault(key, turn)

    def gives_up(self, turn: float) -> float | None:
        """When what would go for something else is wanted: infinite for what is not needed; None where nothing may go,
        as all is wanted sooner than this turn."""
        if len(self.taken) + len(self._held) < self._size:
            return inf
        if not self._held or len(self.taken) >= self._size:
            return None
        last = next(reversed(self._held.values()))
        return last if last > turn else None

    def take(self, key: ExpertKey) -> None:
        """Bring it in, for what is wanted last."""
        if len(self.taken) + len(self._held) >= self._size:
            self._held.popitem()
        self.taken.append(key)
