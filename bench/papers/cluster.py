"""A cluster that decodes on a clock of its own: a main machine, workers that compute the experts, perhaps a draft.

One layer, time to the right; main's port carries one message after the other in each direction:

    main      | its part | rows to the first | to the second |       ...       | next layer
    port up              | message           | message       |
    worker a             named ahead: load ......... | compute |
    worker b             named ahead: load ............. | wait .. | compute |
    port down                                                  | message | message |

What each machine computes and prefetches is decided by the product's own `Placement` and `by_turns`. A prediction that
was right has its load behind it when rows arrive; one that was wrong, or came late, makes the layer wait for a load.
Faults and several sequences are not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from bench.papers.cluster_worker import SimulatedWorker
from smoe.expert import EXACT, ExpertKey
from smoe.policy.placement import Placement, WorkerView, by_turns, group
from smoe.policy.plan import DEVICE, FIRST_WORKER, Serve
from smoe.routing import Phase, Routing
from smoe.simulator.cluster import DecodedToken, Wire
from smoe.simulator.cluster_draft import DraftTimes, SimulatedDraft
from smoe.simulator.cluster_machine import WorkerTimes
from smoe.simulator.events import Events, Resource

_NAMES_BYTES = 64
"""Bytes of a message that names experts, or a token."""


@dataclass(frozen=True)
class AlignedDraft(DraftTimes):
    """A draft model that receives tokens, keys and values at intervals, as the paper has it."""

    token_period: int = 1
    """The interval, in tokens, at which the draft model receives the coordinator's token; 0: never."""
    kv_period: int = 1
    """The interval, in tokens, at which the draft model receives keys and values; 0: never."""
    kv_bytes: float = 0.0
    """Bytes of keys and values of one position in all layers."""
    kv_since: bool = True
    """Whether the keys and values of all positions since the last transfer are sent; otherwise only those of the newest
    position are sent."""

    def is_sent(self, token: int) -> bool:
        """Return whether the draft model must wait for data from the coordinator before it starts this token."""
        return _is_due(self.token_period, token) or self.kv_is_due(token)

    def kv_is_due(self, token: int) -> bool:
        return _is_due(self.kv_period, token)

    @property
    def kv_message_bytes(self) -> float:
        return self.kv_bytes * (self.kv_period if self.kv_since else 1)


def _is_due(period: int, token: int) -> bool:
    return period > 0 and token % period == 0


@dataclass(frozen=True)
class ClusterSetting:
    """A cluster and how it works. Times in seconds."""

    layer: float
    """Main's part of a layer: everything but the experts."""
    wire: Wire
    row_bytes: float
    """Bytes of a hidden state; one goes to each worker that computes, one comes back for each expert."""
    workers: Sequence[WorkerTimes]
    placement: str = "round-robin"
    """One of `PLACEMENT`."""
    group_size: int | None = None
    """Workers of a group by turns: as many as a token chooses, and perhaps spares; None: as many as it chooses."""
    turns_run_on: bool = False
    """Whether turns continue from token to token, so that each group has all the turns of the others to load; else a
    layer's turn is always the same group's, as in the product, and where groups do not divide the layers some come too
    soon."""
    draft: AlignedDraft | None = None
    """None: what is named is known in advance, as far ahead as slots allow."""
    main_names: bool = False
    """Without a draft: main itself names a layer's experts, when the router of the layer before has spoken."""
    here: WorkerTimes | None = None
    """What main computes itself, by `finish`: the experts in its own slots, and those that are done here first. None:
    nothing."""


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
    """(begin, end) of all that each part did: main's ports, the draft's, every worker's link and arithmetic."""
    most_held: int = 0
    """Experts in a worker's slots at one time."""

    @property
    def seconds_per_token(self) -> float:
        return sum(self.token_seconds) / len(self.token_seconds)


def decode(setting: ClusterSetting, tokens: Sequence[DecodedToken]) -> ClusterRun:
    """Decode these tokens; all have the same number of layers."""
    run = _PaperDecoding(setting, tokens)
    run.begin()
    return run.finished()


class _PaperDecoding:
    def __init__(self, setting: ClusterSetting, tokens: Sequence[DecodedToken]) -> None:
        self._setting, self._tokens = setting, tokens
        self._layers = len(tokens[0].chosen)
        self._events = Events()
        self._up, self._down, self._draft_up = (Resource(self._events) for _ in range(3))
        self._units = range(FIRST_WORKER, FIRST_WORKER + len(setting.workers))
        self._workers = {
            unit: SimulatedWorker(self._events, times) for unit, times in zip(self._units, setting.workers, strict=True)
        }
        if setting.here is not None:
            self._workers[DEVICE] = SimulatedWorker(self._events, setting.here)
        self._run = ClusterRun()
        self._awaited = 0
        self._layer_began = self._token_began = 0.0
        self._kv_due = False
        self._draft: SimulatedDraft | None = None
        if setting.draft is not None:
            is_right = [token.own_is_right for token in tokens]
            self._draft = SimulatedDraft(self._events, setting.draft, self._layers, is_right, self._says, self._unsays)

    @property
    def _knows_ahead(self) -> bool:
        return self._draft is None and not self._setting.main_names

    def begin(self) -> None:
        if self._knows_ahead:
            for number in range(min(2, len(self._tokens))):
                self._name_token(number)
        self._begin_token(0)
        self._events.run()

    def finished(self) -> ClusterRun:
        run = self._run
        run.busy = {"up": self._up.spans, "down": self._down.spans, "draft's": self._draft_up.spans}
        for unit, worker in self._workers.items():
            run.busy[f"link of {unit}"], run.busy[f"experts of {unit}"] = worker.loads, worker.computing
            run.loads += len(worker.loads)
            run.late_loads += worker.asked_loads
            run.most_held = max(run.most_held, worker.most_held)
        return run

    # -- announcements ------------------------------------------------------------------------------------------------

    def _name_token(self, number: int) -> None:
        """Name a token's experts at no cost: what is known in advance."""
        named = self._tokens[number].named
        for layer, experts in enumerate(named or ()):
            for step, unit, keys in self._shared_out(number, layer, experts):
                self._workers[unit].name(step, keys)

    def _says(self, number: int, layer: int, is_right: bool) -> None:
        token = self._tokens[number]
        named = token.named if is_right else token.astray
        for step, unit, keys in self._shared_out(number, layer, named[layer] if named else ()):
            self._draft_sends(partial(self._workers[unit].name, step, keys))

    def _unsays(self, number: int) -> None:
        for worker in self._workers.values():
            self._draft_sends(partial(worker.unname, number * self._layers))

    def _draft_sends(self, arrives: partial[None]) -> None:
        wire = self._setting.wire
        self._events.at(self._draft_up.use(wire.seconds(_NAMES_BYTES)) + wire.delay, arrives)

    def _shared_out(
        self, number: int, layer: int, experts: Sequence[int]
    ) -> Iterator[tuple[int, int, list[ExpertKey]]]:
        """(step, worker, the experts announced to it), as the product does (`Cluster.guess`)."""
        step, keys = number * self._layers + layer, [(layer, expert, EXACT) for expert in experts]
        if self._setting.placement == "finish":
            at_hand = set[ExpertKey]().union(*(worker.holds(step) for worker in self._workers.values()))
            shares = self._by_finish(step, layer, [key for key in keys if key not in at_hand])
        else:
            chosen = len(self._tokens[number].chosen[layer])
            shares = self._by_turns(step, keys, chosen)
        for unit, experts_named in shares.items():
            yield step, unit, experts_named

    def _turn(self, step: int) -> int:
        return step if self._setting.turns_run_on else step % self._layers

    # -- main ---------------------------------------------------------------------------------------------------------

    def _begin_token(self, number: int) -> None:
        self._token_began = self._events.now
        if self._knows_ahead and 0 < number < len(self._tokens) - 1:
            self._name_token(number + 1)
        if self._draft is not None:
            self._tell_draft(number)
        self._begin_layer(number, 0)

    def _tell_draft(self, number: int) -> None:
        draft, times, wire = self._draft, self._setting.draft, self._setting.wire
        assert draft is not None and times is not None
        nbytes = float(_NAMES_BYTES)
        self._kv_due = times.is_early and times.kv_is_due(number)
        if times.kv_is_due(number) and not times.is_early:
            nbytes += times.kv_message_bytes
        if times.is_early or times.is_sent(number):
            self._events.at(self._up.use(wire.seconds(nbytes)) + wire.delay, partial(draft.reach, number))
        else:
            draft.reach(number)  # it goes on by itself, and begins with main

    def _begin_layer(self, number: int, layer: int) -> None:
        self._layer_began = self._events.now
        self._events.at(self._events.now + self._setting.layer, partial(self._routed, number, layer))

    def _routed(self, number: int, layer: int) -> None:
        """The router has spoken: rows go out, and workers with announcements get the true choice."""
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
            answer = partial(self._answered, number, layer, unit, len(share))
            self._coordinator_sends(unit, setting.row_bytes, partial(self._workers[unit].ask, step, share, answer))
        for unit in others:  # announced in vain
            nothing = partial(self._workers[unit].ask, step, [], _ignore)
            if setting.draft is None:
                nothing()  # a guess of the product's is just forgotten in time
            else:
                self._coordinator_sends(unit, _NAMES_BYTES, nothing)
        if self._kv_due and self._setting.draft is not None:  # after the first rows: no thread waits for it
            self._up.use(self._setting.wire.seconds(self._setting.draft.kv_message_bytes))
            self._kv_due = False
        if self._setting.main_names and layer + 1 < self._layers:
            self._name_layer(number, layer + 1)

    def _name_layer(self, number: int, layer: int) -> None:
        """Name a layer's experts, by the coordinator, after the rows."""
        named = self._tokens[number].named
        for step, unit, keys in self._shared_out(number, layer, named[layer] if named else ()):
            self._coordinator_sends(unit, _NAMES_BYTES, partial(self._workers[unit].name, step, keys))

    def _coordinator_sends(self, unit: int, nbytes: float, arrives: Callable[[], None]) -> None:
        if unit == DEVICE:
            arrives()
            return
        end = self._up.use(self._setting.wire.seconds(nbytes))
        self._events.at(end + self._delay(unit), arrives)

    def _delay(self, unit: int) -> float:
        return self._setting.wire.delay + self._workers[unit].times.away

    def _by_turns(self, step: int, keys: Sequence[ExpertKey], chosen: int) -> dict[int, list[ExpertKey]]:
        """Divide experts as one of the group holds them, or in their order."""
        views = [self._view(unit, step) for unit in self._units]
        return _by_unit(by_turns(keys, self._setting.group_size or chosen, self._turn(step), views))

    def _by_finish(self, step: int, layer: int, keys: Sequence[ExpertKey]) -> dict[int, list[ExpertKey]]:
        """What main holds it computes; of the others each goes where it is done first. The most important come first:
        by their places among a token's choices here."""
        if not keys:
            return {}
        here = self._setting.here
        own = set() if here is None else self._workers[DEVICE].holds(step)
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

    def _answered(self, number: int, layer: int, unit: int, experts: int) -> None:
        """One is done; a worker's rows are on their way."""
        if unit == DEVICE:
            self._arrived(number, layer)
            return
        arrives = partial(self._arrives, number, layer, experts)
        self._events.at(self._events.now + self._delay(unit), arrives)

    def _arrives(self, number: int, layer: int, experts: int) -> None:
        end = self._down.use(self._setting.wire.seconds(experts * self._setting.row_bytes))
        self._events.at(end, partial(self._arrived, number, layer))

    def _arrived(self, number: int, layer: int) -> None:
        self._awaited -= 1
        if self._awaited:
            return
        self._run.layers.append((self._layer_began, self._events.now))
        if layer + 1 < self._layers:
            self._begin_layer(number, layer + 1)
            return
        self._run.token_seconds.append(self._events.now - self._token_began)
        if number + 1 < len(self._tokens):
            self._begin_token(number + 1)


def _ignore() -> None:
    """Ignores an answer without a request."""


def _by_unit(units: Mapping[ExpertKey, int]) -> dict[int, list[ExpertKey]]:
    """Ascending, so that messages leave in the same order for every placement."""
    shares: dict[int, list[ExpertKey]] = {unit: [] for unit in sorted({*units.values()})}
    for key, unit in units.items():
        shares[unit].append(key)
    return shares
