"""A cluster that decodes on a clock of its own: a main machine, workers that compute the experts, perhaps a shadow.

One layer, time to the right; main's port carries one message after the other in each direction:

    main      | its part | rows to the first | to the second |       ...       | next layer
    port up              | message           | message       |
    worker a             named ahead: load ......... | compute |
    worker b             named ahead: load ............. | wait .. | compute |
    port down                                                  | message | message |

Who computes what, and who is told ahead, is decided by the product's own `Placement` and `by_turns`. A prediction that
was right has its load behind it when rows arrive; one that was wrong, or came late, makes the layer wait for a load.
Faults and several sequences are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

from smoe.expert import EXACT, ExpertKey
from smoe.policy.placement import Placement, WorkerView, by_turns, group
from smoe.policy.plan import DEVICE, FIRST_WORKER, Serve
from smoe.routing import Phase, Routing
from smoe.simulator.cluster_shadow import ShadowTimes, SimulatedShadow
from smoe.simulator.cluster_worker import SimulatedWorker, WorkerTimes
from smoe.simulator.events import Events, Line

_NAMES_BYTES = 64
"""Of a message that names experts, or a token."""


@dataclass(frozen=True)
class Wire:
    """A port, and the way from there."""

    bytes_per_second: float
    delay: float = 0.0
    """One way, seconds."""
    message: float = 0.0
    """For which every message holds the port beside its bytes, seconds."""

    def seconds(self, nbytes: float) -> float:
        return self.message + nbytes / self.bytes_per_second


class DecodedToken(NamedTuple):
    """What the routers chose for one token, and what was named ahead."""

    chosen: Sequence[Sequence[int]]
    """[L][K]"""
    named: Sequence[Sequence[int]] | None = None
    """[L][K, or more with spares]; None: nobody names any."""
    own_is_right: bool = True
    """Whether the shadow's own token is this one,"""
    astray: Sequence[Sequence[int]] | None = None
    """and what it names where it is not."""


@dataclass(frozen=True)
class ClusterSetting:
    """A cluster and how it works. Times in seconds."""

    layer: float
    """Main's part of a layer: everything but the experts."""
    wire: Wire
    row_bytes: float
    """Of a hidden state; one goes to each worker that computes, one comes back for each expert."""
    workers: Sequence[WorkerTimes]
    placement: str = "round-robin"
    """One of `PLACEMENT`."""
    group_size: int | None = None
    """Workers of a group by turns: as many as a token chooses, and perhaps spares; None: as many as it chooses."""
    turns_run_on: bool = False
    """From token to token, so that each group has all the turns of the others to load; else a layer's turn is always
    the same group's, as in the product, and where groups do not divide the layers some come too soon."""
    shadow: ShadowTimes | None = None
    """None: what is named is known in advance, as far ahead as slots allow."""
    main_names: bool = False
    """Without a shadow: main itself names a layer's experts, when the router of the layer before has spoken."""
    here: WorkerTimes | None = None
    """What main computes itself, by `finish`: the experts in its own slots, and those that are done here first. None:
    nothing."""
    shadow_is_here: bool = False
    """On main itself, as in the product: telling it takes nothing, what it says leaves by main's port, and of what was
    named for nothing no worker is told."""
    held: Mapping[int, Sequence[ExpertKey]] = field(default_factory=dict)
    """What machines have in their slots from the beginning, by unit, those used last at the end."""


class Waits(NamedTuple):
    """What a token's seconds went to, by the last answer of each layer."""

    main: float = 0.0
    """Main's part of the layers."""
    between: float = 0.0
    """There and back, and in main's ports."""
    computing: float = 0.0
    """The experts of that answer, one after the other."""
    loads: float = 0.0
    """At its worker: until they were there, and others before them computed."""
    own_loads: float = 0.0
    """The same at main."""


class _Asked(NamedTuple):
    """Who computes a part of the layer under way."""

    unit: int
    experts: int
    arrived: float
    """When its rows did."""


@dataclass
class ClusterRun:
    """What became of the tokens."""

    token_seconds: list[float] = field(default_factory=list)
    layers: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of each, main's part and experts."""
    loads: int = 0
    late_loads: int = 0
    """Begun when main had asked for the expert: not named, named wrongly, or not in time."""
    busy: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """(begin, end) of all that each part did: main's ports, the shadow's, every worker's link and arithmetic."""
    most_held: int = 0
    """Experts in a worker's slots at one time."""
    waits: list[Waits] = field(default_factory=list)
    """Of every token."""

    @property
    def seconds_per_token(self) -> float:
        return sum(self.token_seconds) / len(self.token_seconds)

    def loads_since(self, token: int) -> tuple[int, int]:
        """(at workers, at main) begun from this token on."""
        begin = sum(self.token_seconds[:token])
        loads = {name: sum(since >= begin for since, _ in spans) for name, spans in self.busy.items() if "link" in name}
        here = loads.pop(f"link of {DEVICE}", 0)
        return sum(loads.values()), here


def decode(setting: ClusterSetting, tokens: Sequence[DecodedToken]) -> ClusterRun:
    """Decode these tokens; all have the same number of layers."""
    run = _Decoding(setting, tokens)
    run.begin()
    return run.finished()


class _Decoding:
    def __init__(self, setting: ClusterSetting, tokens: Sequence[DecodedToken]) -> None:
        self._setting, self._tokens = setting, tokens
        self._layers = len(tokens[0].chosen)
        self._events = Events()
        self._up, self._down, self._shadow_up = (Line(self._events) for _ in range(3))
        self._units = range(FIRST_WORKER, FIRST_WORKER + len(setting.workers))
        self._workers = {
            unit: SimulatedWorker(self._events, times) for unit, times in zip(self._units, setting.workers, strict=True)
        }
        if setting.here is not None:
            self._workers[DEVICE] = SimulatedWorker(self._events, setting.here)
        for unit, keys in setting.held.items():
            self._workers[unit].begin_with(keys)
        self._run = ClusterRun()
        self._awaited = 0
        self._layer_began = self._token_began = 0.0
        self._waits = Waits()
        self._kv_due = False
        self._shadow: SimulatedShadow | None = None
        if setting.shadow is not None:
            is_right = [token.own_is_right for token in tokens]
            self._shadow = SimulatedShadow(
                self._events, setting.shadow, self._layers, is_right, self._says, self._unsays
            )

    @property
    def _knows_ahead(self) -> bool:
        return self._shadow is None and not self._setting.main_names

    def begin(self) -> None:
        if self._knows_ahead:
            for number in range(min(2, len(self._tokens))):
                self._name_token(number)
        self._begin_token(0)
        self._events.run()

    def finished(self) -> ClusterRun:
        run = self._run
        run.busy = {"up": self._up.spans, "down": self._down.spans, "shadow's": self._shadow_up.spans}
        for unit, worker in self._workers.items():
            run.busy[f"link of {unit}"], run.busy[f"experts of {unit}"] = worker.loads, worker.computing
            run.loads += len(worker.loads)
            run.late_loads += worker.asked_loads
            run.most_held = max(run.most_held, worker.most_held)
        return run

    # -- who is told ahead --------------------------------------------------------------------------------------------

    def _name_token(self, number: int) -> None:
        """At no cost: what is known in advance."""
        named = self._tokens[number].named
        for layer, experts in enumerate(named or ()):
            for step, unit, keys in self._shared_out(number, layer, experts):
                self._workers[unit].name(step, keys)

    def _says(self, number: int, layer: int, is_right: bool) -> None:
        token = self._tokens[number]
        named = token.named if is_right else token.astray
        for step, unit, keys in self._shared_out(number, layer, named[layer] if named else ()):
            self._shadow_sends(unit, partial(self._workers[unit].name, step, keys))

    def _unsays(self, number: int) -> None:
        for unit, worker in self._workers.items():
            self._shadow_sends(unit, partial(worker.unname, number * self._layers))

    def _shadow_sends(self, unit: int, arrives: partial[None]) -> None:
        if self._setting.shadow_is_here:
            self._main_sends(unit, _NAMES_BYTES, arrives)
            return
        end = self._shadow_up.use(self._setting.wire.seconds(_NAMES_BYTES))
        self._events.at(end + self._delay(unit), arrives)

    def _shared_out(
        self, number: int, layer: int, experts: Sequence[int]
    ) -> Iterator[tuple[int, int, list[ExpertKey]]]:
        """(step, worker, what it is told to expect), as the product does (`Cluster.guess`)."""
        step, keys = number * self._layers + layer, [(layer, expert, EXACT) for expert in experts]
        if self._setting.placement == "finish":
            held = [worker.holds(step) for worker in self._workers.values()]
            shares = self._by_finish(step, layer, [key for key in keys if not any(key in each for each in held)])
        else:
            chosen = len(self._tokens[number].chosen[layer])
            shares = self._by_turns(step, keys, chosen)
        for unit, told in shares.items():
            yield step, unit, told

    def _turn(self, step: int) -> int:
        return step if self._setting.turns_run_on else step % self._layers

    # -- main ---------------------------------------------------------------------------------------------------------

    def _begin_token(self, number: int) -> None:
        self._token_began, self._waits = self._events.now, Waits()
        if self._knows_ahead and 0 < number < len(self._tokens) - 1:
            self._name_token(number + 1)
        if self._shadow is not None:
            self._tell_shadow(number)
        self._begin_layer(number, 0)

    def _tell_shadow(self, number: int) -> None:
        shadow, times, wire = self._shadow, self._setting.shadow, self._setting.wire
        assert shadow is not None and times is not None
        if self._setting.shadow_is_here:
            shadow.tell(number)
            return
        nbytes = float(_NAMES_BYTES)
        self._kv_due = times.is_early and times.kv_is_due(number)
        if times.kv_is_due(number) and not times.is_early:
            nbytes += times.kv_message_bytes
        if times.is_early or times.is_told(number):
            self._events.at(self._up.use(wire.seconds(nbytes)) + wire.delay, partial(shadow.tell, number))
        else:
            shadow.tell(number)  # it goes on by itself, and begins with main

    def _begin_layer(self, number: int, layer: int) -> None:
        self._layer_began = self._events.now
        self._events.at(self._events.now + self._setting.layer, partial(self._routed, number, layer))

    def _routed(self, number: int, layer: int) -> None:
        """The router has spoken: rows go out, and who was told ahead hears what it is to be."""
        step, setting, chosen = number * self._layers + layer, self._setting, self._tokens[number].chosen[layer]
        keys = [(layer, expert, EXACT) for expert in chosen]
        if setting.placement == "finish":
            shares, others = self._by_finish(step, layer, keys), list[int]()
        else:
            shares = self._by_turns(step, keys, len(chosen))
            turn = group(self._turn(step), setting.group_size or len(chosen), self._units)
            others = [unit for unit in turn if unit not in shares]
        self._awaited = len(shares)
        for unit, share in shares.items():
            self._main_sends(unit, setting.row_bytes, partial(self._reaches, number, layer, unit, share))
        for unit in others:  # it was told for nothing
            nothing = partial(self._workers[unit].ask, step, [], _nobody_waits)
            if setting.shadow is None or setting.shadow_is_here:
                nothing()  # a guess of the product's is just forgotten in time
            else:
                self._main_sends(unit, _NAMES_BYTES, nothing)
        if self._kv_due and self._setting.shadow is not None:  # after the first rows: nobody waits for it
            self._up.use(self._setting.wire.seconds(self._setting.shadow.kv_message_bytes))
            self._kv_due = False
        if self._setting.main_names and layer + 1 < self._layers:
            self._name_layer(number, layer + 1)

    def _name_layer(self, number: int, layer: int) -> None:
        """By main, after the rows."""
        named = self._tokens[number].named
        for step, unit, keys in self._shared_out(number, layer, named[layer] if named else ()):
            self._main_sends(unit, _NAMES_BYTES, partial(self._workers[unit].name, step, keys))

    def _main_sends(self, unit: int, nbytes: float, arrives: Callable[[], None]) -> None:
        if unit == DEVICE:
            arrives()
            return
        end = self._up.use(self._setting.wire.seconds(nbytes))
        self._events.at(end + self._delay(unit), arrives)

    def _delay(self, unit: int) -> float:
        return self._setting.wire.delay + self._workers[unit].times.away

    def _by_turns(self, step: int, keys: Sequence[ExpertKey], chosen: int) -> dict[int, list[ExpertKey]]:
        """As one of the group holds them, or in their order."""
        views = [self._view(unit, step) for unit in self._units]
        return _by_unit(by_turns(keys, self._setting.group_size or chosen, self._turn(step), views))

    def _by_finish(self, step: int, layer: int, keys: Sequence[ExpertKey]) -> dict[int, list[ExpertKey]]:
        """What main holds it computes; of the others each goes where it is done first. The most important come first:
        by their places among a token's choices here."""
        if not keys:
            return {}
        here = self._setting.here
        own: Container[ExpertKey] = () if here is None else self._workers[DEVICE].holds(step)
        views = [self._view(unit, step) for unit in self._units]
        placement = Placement("finish", "score", views, inf if here is None else here.load, 0.0, layer)
        chosen = tuple(expert for _, expert, _ in keys)
        routing = Routing(layer, Phase.DECODE, max(chosen) + 1, (chosen,))
        missing = [Serve(key, (place,), True) for place, key in enumerate(keys) if key not in own]
        loads, given = placement.split(missing, routing)
        shares = _by_unit({serve.key: serve.unit for serve in given})
        mine = [key for key in keys if key in own] + [serve.key for serve in loads]
        return shares | {DEVICE: mine} if mine else shares

    def _view(self, unit: int, step: int) -> WorkerView:
        worker, wire = self._workers[unit], self._setting.wire
        times, hop = worker.times, 2 * (wire.seconds(self._setting.row_bytes) + self._delay(unit))
        return WorkerView(unit, worker.holds(step), times.load, times.expert, times.expert, hop)

    def _reaches(self, number: int, layer: int, unit: int, share: Sequence[ExpertKey]) -> None:
        """Rows have come to who computes them."""
        asked = _Asked(unit, len(share), self._events.now)
        answer = partial(self._answered, number, layer, asked)
        self._workers[unit].ask(number * self._layers + layer, share, answer)

    def _answered(self, number: int, layer: int, asked: _Asked) -> None:
        """One is done; a worker's rows are on their way."""
        there = self._events.now - asked.arrived
        if asked.unit == DEVICE:
            self._arrived(number, layer, asked, there)
            return
        arrives = partial(self._arrives, number, layer, asked, there)
        self._events.at(self._events.now + self._delay(asked.unit), arrives)

    def _arrives(self, number: int, layer: int, asked: _Asked, there: float) -> None:
        end = self._down.use(self._setting.wire.seconds(asked.experts * self._setting.row_bytes))
        self._events.at(end, partial(self._arrived, number, layer, asked, there))

    def _arrived(self, number: int, layer: int, asked: _Asked, there: float) -> None:
        self._awaited -= 1
        if self._awaited:
            return
        self._run.layers.append((self._layer_began, self._events.now))
        self._waits = self._with_waits(asked, there)
        if layer + 1 < self._layers:
            self._begin_layer(number, layer + 1)
            return
        self._run.token_seconds.append(self._events.now - self._token_began)
        self._run.waits.append(self._waits)
        if number + 1 < len(self._tokens):
            self._begin_token(number + 1)

    def _with_waits(self, last: _Asked, there: float) -> Waits:
        """Those of the token so far, with this layer's."""
        waits, whole = self._waits, self._events.now - self._layer_began - self._setting.layer
        computing = last.experts * self._workers[last.unit].times.expert
        loads = there - computing
        waits = waits._replace(
            main=waits.main + self._setting.layer,
            between=waits.between + whole - there,
            computing=waits.computing + computing,
        )
        if last.unit == DEVICE:
            return waits._replace(own_loads=waits.own_loads + loads)
        return waits._replace(loads=waits.loads + loads)


def _nobody_waits() -> None:
    """For an answer to nothing."""


def _by_unit(units: Mapping[ExpertKey, int]) -> dict[int, list[ExpertKey]]:
    """Ascending, so that messages leave in the same order whoever holds what."""
    shares: dict[int, list[ExpertKey]] = {unit: [] for unit in sorted({*units.values()})}
    for key, unit in units.items():
        shares[unit].append(key)
    return shares
