"""Simulates decoding on a cluster, with the decisions of the real program and given times.

    coordinator         | layer | plan | send rows | own experts | wait | layer ...
    coordinator's port                    | up | up |               | down |
    workers             read announced experts ahead; read and compute requested ones; reply (`cluster_machine.py`)
    draft model         | layer | layer | ...  on the coordinator: each layer's predictions are sent at once

Time goes to the right. `Placement` decides which machine computes which expert, and `AheadSchedule` which experts are
announced, as in `cluster/remote.py`. The coordinator measures its workers' times, so they vary a little, and equal
workers differ (`spread`). There is one sequence of decode steps, and no machine fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

from smoe.expert import EXACT, ExpertKey
from smoe.policy.ahead import AheadSchedule, Here, TokenLayer
from smoe.policy.placement import Placement, WorkerView
from smoe.policy.plan import DEVICE, FIRST_WORKER, Serve
from smoe.routing import Phase, Routing
from smoe.simulator.cluster_draft import DraftTimes, SimulatedDraft
from smoe.simulator.cluster_machine import SimulatedMachine, SimulatedRequest, WorkerTimes
from smoe.simulator.events import Events, Resource

_NAMES_BYTES = 64
"""The size in bytes of a message that announces experts."""
_WEIGHT = 0.2
"""The weight of a new measurement in the decaying mean of a worker's load time (`cluster/members.py`)."""
_LATE_USES = 512
"""The number of requested experts after which the earlier counts of a worker are halved (`cluster/members.py`)."""


@dataclass(frozen=True)
class Wire:
    """The coordinator's network port, and its connections to the workers."""

    bytes_per_second: float
    delay: float = 0.0
    """Seconds that a message travels, in one direction."""
    message: float = 0.0
    """Seconds for which every message occupies the port, in addition to the seconds for its bytes."""

    def seconds(self, nbytes: float) -> float:
        return self.message + nbytes / self.bytes_per_second


class DecodedToken(NamedTuple):
    """One token of a recorded run: the experts that its routers chose, and the experts that were predicted."""

    chosen: Sequence[Sequence[int]]
    """[L][K] the experts chosen in each layer."""
    named: Sequence[Sequence[int]] | None = None
    """For each layer, the predicted experts: [L][K, or more with extra predictions]. None: there are no predictions."""
    own_is_right: bool = True
    """Whether the draft model, decoding from its own previous token, arrives at the token that the model decodes."""
    astray: Sequence[Sequence[int]] | None = None
    """The experts that the draft model predicts if its own token is a different one."""


@dataclass(frozen=True)
class SimulatedCluster:
    """The description of a simulated cluster. Times are in seconds."""

    layer: float
    """The coordinator's time for a layer without its routed experts."""
    wire: Wire
    row_bytes: float
    """Bytes of a hidden state. One hidden state is sent to each worker that computes, and one is returned for each
    expert."""
    workers: Sequence[WorkerTimes]
    """The times of the workers. Their `away` is half of the round trip, without the time of `wire`."""
    placement: str
    """One of `PLACEMENT`."""
    here: WorkerTimes | None = None
    """The times of the coordinator's own loads and computations; None: it computes no experts."""
    here_ahead: int = 1
    """The number of experts that the coordinator can load before they are requested."""
    draft: DraftTimes | None = None
    """The draft model's times. None: the coordinator announces the experts predicted for a layer after the router of
    the layer before."""
    held: Mapping[int, Sequence[ExpertKey]] = field(default_factory=dict)
    """{machine: the experts in its slots at first}, those used last at the end."""
    spread: float = 0.0
    """The relative standard deviation of measured load times."""


class TokenWaits(NamedTuple):
    """The times of which a token's time consists, in seconds. In each layer, the result that arrives last determines
    them."""

    main: float = 0.0
    """The time of the coordinator for the layers without their routed experts."""
    between: float = 0.0
    """The time on the network and in the coordinator's port."""
    computing: float = 0.0
    """The time in which the experts of the last result to arrive were computed, one after the other."""
    loads: float = 0.0
    """The time in which the worker whose result arrived last loaded the requested experts and computed experts of
    earlier requests."""
    own_loads: float = 0.0
    """The time of the same work on the coordinator, if the coordinator's own result was the last."""


@dataclass
class SimulatedRun:
    """The result of a simulated run."""

    token_seconds: list[float] = field(default_factory=list)
    waits: list[TokenWaits] = field(default_factory=list)
    """For each token, the times of which its time consists."""
    loads: dict[int, list[float]] = field(default_factory=dict)
    """{machine: the times at which its loads began}."""

    def loads_since(self, token: int) -> tuple[int, int]:
        """Return (the number of loads on workers, the number of loads on the coordinator) that began with token number
        `token` or later."""
        begin = sum(self.token_seconds[:token])
        count = {unit: sum(since >= begin for since in began) for unit, began in self.loads.items()}
        here = count.pop(DEVICE, 0)
        return sum(count.values()), here


def decode(cluster: SimulatedCluster, tokens: Sequence[DecodedToken]) -> SimulatedRun:
    """Simulate the decoding of `tokens`, all of which must have the same number of layers. Return the times and the
    loads."""
    return _Decoding(cluster, tokens).run()


class _Known:
    """The coordinator's measurements of a worker, as in `Member`."""

    def __init__(self, load: float, spread: float, chance: random.Random) -> None:
        self._load, self._spread, self._chance = load, spread, chance
        self.load = self._measured()
        self.uses = self.brought = 0

    def note_load(self) -> None:
        self.load += _WEIGHT * (self._measured() - self.load)

    def note_uses(self, uses: int, brought: int) -> None:
        if self.uses >= _LATE_USES:
            self.uses, self.brought = self.uses // 2, self.brought // 2
        self.uses, self.brought = self.uses + uses, self.brought + brought

    def _measured(self) -> float:
        return self._load * max(0.0, 1 + self._spread * self._chance.gauss(0.0, 1.0))


class _Decoding:
    def __init__(self, cluster: SimulatedCluster, tokens: Sequence[DecodedToken]) -> None:
        self._cluster, self._tokens = cluster, tokens
        self._layers = len(tokens[0].chosen)
        self._events = Events()
        self._up, self._down = Resource(self._events), Resource(self._events)
        chance = random.Random(0)
        self._workers = {
            FIRST_WORKER + n: SimulatedMachine(self._events, times) for n, times in enumerate(cluster.workers)
        }
        self._known = {unit: _Known(each.times.load, cluster.spread, chance) for unit, each in self._workers.items()}
        self._here = None if cluster.here is None else SimulatedMachine(self._events, cluster.here)
        self._here_uses = 0
        for unit, machine in self._machines.items():
            machine.begin_with(cluster.held.get(unit, ()))
        self._rule = Placement(cluster.placement, "score", (), inf, 0.0, 0)
        here = Here(self._here_load, self._here_retained, self._is_at_hand, cluster.here_ahead)
        turns, clock = {layer: layer for layer in range(self._layers)}, partial(getattr, self._events, "now")
        self._ahead = AheadSchedule(
            cluster.placement, turns, 0, here, self._costs_later, self._tell, clock, nullcontext()
        )
        self._run = SimulatedRun()
        self._awaited = 0
        self._layer_began = self._token_began = 0.0
        self._waits = TokenWaits()
        self._draft: SimulatedDraft | None = None
        if cluster.draft is not None:
            right = [token.own_is_right for token in tokens]
            self._draft = SimulatedDraft(
                self._events, cluster.draft, self._layers, right, self._says, self._ahead.withdraw
            )

    @property
    def _machines(self) -> dict[int, SimulatedMachine]:
        return self._workers | ({} if self._here is None else {DEVICE: self._here})

    def run(self) -> SimulatedRun:
        self._begin_token(0)
        self._events.run()
        self._run.loads = {unit: machine.loads for unit, machine in self._machines.items()}
        return self._run

    # -- what the coordinator knows ------------------------------------------------------------------------------------

    def _views(self) -> list[WorkerView]:
        return [self._view(unit, worker) for unit, worker in self._workers.items()]

    def _view(self, unit: int, worker: SimulatedMachine) -> WorkerView:
        times, wire = worker.times, self._cluster.wire
        hop = 2 * (wire.seconds(self._cluster.row_bytes) + wire.delay + times.away)
        return WorkerView(unit, worker, self._known[unit].load, times.expert, times.expert, hop, 0.0, worker.brought_at)

    def _here_load(self) -> float:
        return inf if self._here is None else self._here.times.load

    def _is_at_hand(self, key: ExpertKey) -> bool:
        return self._here is not None and key in self._here

    def _here_retained(self) -> float:
        assert self._here is not None
        return max(0.0, 1.0 - len(self._here.loads) / self._here_uses) if self._here_uses else 0.0

    def _costs_later(self) -> float:
        """Return the extra cost, in seconds, of a load on the coordinator, because experts there are evicted sooner
        than on workers. It is computed as in `Cluster` (`cluster/remote.py`)."""
        uses = sum(known.uses for known in self._known.values())
        if self._here is None or not uses:
            return 0.0
        held_share = max(0.0, 1.0 - sum(known.brought for known in self._known.values()) / uses)
        loads = [known.load for known in self._known.values()]
        return (held_share - self._here_retained()) * sum(loads) / len(loads)

    # -- announcements ------------------------------------------------------------------------------------------------

    def _says(self, number: int, layer: int, is_right: bool) -> None:
        token = self._tokens[number]
        named = token.named if is_right else token.astray
        if named is not None:
            self._ahead.expect({TokenLayer(number, layer): named[layer]})

    def _tell(self, unit: int, keys: list[ExpertKey]) -> None:
        worker = self._workers[unit]
        self._known[unit].note_uses(0, sum(key not in worker for key in keys))
        self._coordinator_sends(unit, _NAMES_BYTES, partial(worker.announce, keys))

    def _coordinator_sends(self, unit: int, nbytes: float, arrives: Callable[[], None]) -> None:
        end = self._up.use(self._cluster.wire.seconds(nbytes))
        self._events.at(end + self._delay(unit), arrives)

    def _delay(self, unit: int) -> float:
        return self._cluster.wire.delay + self._workers[unit].times.away

    # -- coordinator ---------------------------------------------------------------------------------------------------

    def _begin_token(self, number: int) -> None:
        self._token_began, self._waits = self._events.now, TokenWaits()
        self._ahead.begin(number, self._views, {unit: worker.times.slots for unit, worker in self._workers.items()})
        if self._draft is not None:
            self._draft.reach(number)
        self._begin_layer(number, 0)

    def _begin_layer(self, number: int, layer: int) -> None:
        self._layer_began = self._events.now
        self._events.at(self._events.now + self._cluster.layer, partial(self._routed, number, layer))

    def _routed(self, number: int, layer: int) -> None:
        """Process a router's choice: request experts from workers, start the coordinator's own experts, and announce
        the predicted experts of later layers."""
        chosen = self._tokens[number].chosen[layer]
        self._ahead.asked(layer, set(chosen))
        keys = [(layer, expert, EXACT) for expert in chosen]
        own = [key for key in keys if self._is_at_hand(key)]
        loads, shares = self._shared_out(layer, [key for key in keys if key not in own], tuple(chosen))
        self._awaited = len(shares) + bool(own or loads)
        for unit, share in shares.items():
            self._known[unit].note_uses(len(share), sum(key not in self._workers[unit] for key in share))
            answer = partial(self._answered, number, layer, unit, share)
            arrives = partial(self._workers[unit].ask, share, answer)
            self._coordinator_sends(unit, self._cluster.row_bytes, arrives)
        if own or loads:
            assert self._here is not None
            self._here_uses += len(own) + len(loads)
            self._here.ask([*own, *loads], partial(self._arrived, number, layer, DEVICE, 0.0))
        self._name_later(number, layer)

    def _shared_out(
        self, layer: int, missing: Sequence[ExpertKey], chosen: tuple[int, ...]
    ) -> tuple[list[ExpertKey], dict[int, list[ExpertKey]]]:
        """Return the division of a layer's missing experts: (experts that the coordinator loads, {worker: its
        experts}). The most important experts come first; importance is an expert's position among the token's
        choices."""
        load = self._here_load()
        waits = load * (self._here.under_way if self._here is not None else 0)
        rule = self._rule._replace(
            workers=self._views(),
            here_load=load,
            here_under_way=waits if waits else 0.0,
            turn=self._ahead.turn(self._ahead.place(layer, False)),
            here_costs_later=self._costs_later(),
        )
        routing = Routing(layer, Phase.DECODE, max(chosen) + 1, (chosen,))
        serves = [Serve(key, (chosen.index(key[1]),), True) for key in missing]
        loads, given = rule.split(serves, routing)
        shares: dict[int, list[ExpertKey]] = {}
        for serve in given:
            shares.setdefault(serve.unit, []).append(serve.key)
        return [serve.key for serve in loads], dict(sorted(shares.items()))

    def _name_later(self, number: int, layer: int) -> None:
        """Announce the experts predicted for the next layer, if the coordinator predicts. Start the coordinator's own
        loads for the nearest later layer that has missing experts."""
        named = self._tokens[number].named
        if self._draft is None and named is not None and layer + 1 < self._layers:
            self._ahead.expect({TokenLayer(number, layer + 1): named[layer + 1]})
        if self._here is None:
            return
        for later in range(layer + 1, self._layers):
            keys = [(later, expert, EXACT) for expert in self._ahead.here(later)]
            missing = [key for key in keys if key not in self._here]
            if missing:
                self._here.announce(missing[: self._cluster.here_ahead])
                return

    def _answered(
        self, number: int, layer: int, unit: int, share: Sequence[ExpertKey], request: SimulatedRequest
    ) -> None:
        """Send the results of a worker to the coordinator, once they are computed."""
        there = self._events.now - request.arrived
        arrives = partial(self._arrives, number, layer, unit, share, there, request)
        self._events.at(self._events.now + self._delay(unit), arrives)

    def _arrives(
        self, number: int, layer: int, unit: int, share: Sequence[ExpertKey], there: float, request: SimulatedRequest
    ) -> None:
        end = self._down.use(self._cluster.wire.seconds(len(share) * self._cluster.row_bytes))
        self._events.at(end, partial(self._has_come, number, layer, unit, share, there, request))

    def _has_come(
        self, number: int, layer: int, unit: int, share: Sequence[ExpertKey], there: float, request: SimulatedRequest
    ) -> None:
        if request.loads:
            self._known[unit].note_load()
        self._ahead.answered(unit, share)
        self._arrived(number, layer, unit, there, request)

    def _arrived(self, number: int, layer: int, unit: int, there: float, request: SimulatedRequest) -> None:
        self._awaited -= 1
        if self._awaited:
            return
        self._note_waits(unit, there, request)
        if layer + 1 < self._layers:
            self._begin_layer(number, layer + 1)
            return
        self._run.token_seconds.append(self._events.now - self._token_began)
        self._run.waits.append(self._waits)
        if number + 1 < len(self._tokens):
            self._begin_token(number + 1)

    def _note_waits(self, unit: int, there: float, last: SimulatedRequest) -> None:
        """Add the times of this layer to the times of the token. `last`: the request whose result arrived last."""
        waits, whole = self._waits, self._events.now - self._layer_began - self._cluster.layer
        computing = last.experts * self._machines[unit].times.expert
        waits = waits._replace(main=waits.main + self._cluster.layer, computing=waits.computing + computing)
        if unit == DEVICE:
            self._waits = waits._replace(own_loads=waits.own_loads + whole - computing)
        else:
            between, loads = waits.between + whole - there, waits.loads + there - computing
            self._waits = waits._replace(between=between, loads=loads)
