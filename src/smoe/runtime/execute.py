"""Carrying out one layer's plan on real hardware: start loads, compute what is here, wait for the rest, sum in fixed
order.

One layer in decode, time to the right:

    reading threads   | load a ........ | load b ........ |
    computing thread  | plan | resident experts | wait | a | wait | b | sum

The sum runs in ascending expert order whatever the order of arrival, so a result never depends on residency (grade E1,
and E0 on a CPU).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Protocol

import torch

from smoe.config import EngineConfig
from smoe.expert import Copy
from smoe.kernels.crew import Crew
from smoe.memory.device import Arena
from smoe.memory.store import ExpertStore
from smoe.memory.transfer import State, Ticket, Transfers
from smoe.metrics import Counters
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan import LayerPlan, Load, Serve
from smoe.policy.planner import LAST_TOKENS, layer_share, observation, plan_layer, plan_prefetch
from smoe.policy.residency import ExpertsAtHand, SlotTable
from smoe.policy.selection import substitute
from smoe.policy.trial import Trial
from smoe.routing import Phase, Routing
from smoe.runtime.expert_math import ExpertMath, Weights, library_products
from smoe.runtime.substitution import Scored, Substitution, substitution_of, with_substitutes
from smoe.runtime.team import Team


class Predictor(Protocol):
    """Guesses what a later layer will want."""

    alpha: float
    """The substitution threshold that the layers are served with."""

    def __call__(self, layer: int, hidden: torch.Tensor) -> tuple[int, Sequence[int]] | None:
        """(layer, router input [T, H]) -> (next layer, its experts, best first), or None."""


class LayerExecutor:
    """The experts of all layers on one device. Used by one thread at a time."""

    def __init__(
        self,
        *,
        store: ExpertStore,
        table: SlotTable,
        eviction: Eviction,
        transfers: Transfers,
        arena: Arena,
        math: dict[int, ExpertMath],
        predictors: Mapping[Phase, Predictor],
        counters: Counters,
    ) -> None:
        self.table = table
        self.counters = counters
        self.team: Team | None = None
        """Where set, resident experts are shared out over several threads."""
        self.crew: Crew | None = None
        """Where set, our kernel multiplies single rows."""
        self.trial: Trial | None = None
        """Where set, says whether prefetching in decode pays at present."""
        self.trace: list[Routing] | None = None
        """Where set, every routing is appended: input for the simulator."""
        self._store = store
        self._eviction = eviction
        self._transfers = transfers
        self._arena = arena
        self._math = math
        self._predictors = predictors
        self.substitution: Substitution | None = None
        """Where set, missing low-score experts are replaced."""
        self._layer_share = layer_share(table.cache_slots, len(math))
        self._experts = len(store.keys())
        self._tickets: dict[Copy, Ticket] = {}
        self._promoted: set[Copy] = set()
        """Copies of the running layer that were prefetched and stay, and that have not served yet."""
        self._weights: list[Weights | None] = [None] * (table.cache_slots + table.staging_slots)
        self._views: dict[tuple[int, int], Weights] = {}
        self._queue: deque[Load] = deque()

    @property
    def device(self) -> torch.device:
        return self._arena.device

    @property
    def expert_bytes(self) -> int:
        return self._store.expert_bytes

    def hidden_size(self, layer: int) -> int:
        return self._math[layer].hidden

    def start_anew(self, eviction: Eviction) -> None:
        """Empty slots, no statistics, no counts: the engine's own trials at load are not the user's."""
        self._recover()
        self.table.clear()
        self._eviction = eviction
        self.counters = Counters()
        self.trial = Trial() if self.trial is not None else None
        self._transfers.start_anew()

    def agrees(self, crew: Crew) -> bool:
        """Whether our kernel gives the library's bits on the experts that are resident, one of every layout."""
        seen = {(self._math[c[0]].hidden, self._math[c[0]].inner): c for c in sorted(self.table.ready)}
        return bool(seen) and all(self._math[c[0]].agrees(crew, self._ready(c)) for c in seen.values())

    def compute_by(self, helpers: Crew | Team | None) -> None:
        """From now on single rows are multiplied by our kernel, or by the library on a team of threads, or on one."""
        self.team = helpers if isinstance(helpers, Team) else None
        self.crew = helpers if isinstance(helpers, Crew) else None
        for math in self._math.values():
            math.multiply = library_products if self.crew is None else self.crew.multiply

    def substitute_by(self, config: EngineConfig) -> None:
        """From now on missing low-score experts are replaced, or not, as `config` says."""
        self.substitution = substitution_of(config)
        for predictor in self._predictors.values():
            predictor.alpha = config.alpha

    def compute_slots(self, layer: int, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """One token [1, H] through `count` slots, whatever they hold -> [count, H]: for measuring."""
        placement = self._store.placement(layer, 0)
        slots = [n % len(self._weights) for n in range(count)]
        weights = [self._math[layer].bind(self._arena, slot, placement.parts) for slot in slots]
        out = hidden.new_empty(count, hidden.shape[1])
        self._compute_each(self._math[layer], hidden, weights, out, self.team)
        return out

    def run(
        self,
        layer: int,
        phase: Phase,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scored: Scored | None = None,
    ) -> torch.Tensor:
        """The experts' share of a layer: hidden [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H].

        An error (a failed read, an interrupt) leaves the tables consistent; only this request is lost.
        """
        started = perf_counter()
        rows = top_k_index.tolist()  # the one wait for the device in a layer: everything after depends on it
        choice = None if scored is None else scored.choice_of(LAST_TOKENS if phase is Phase.PREFILL else None)
        routing = Routing(layer, phase, self._store.layers[layer].experts, rows, choice)
        try:
            if self.trace is not None:
                self.trace.append(routing)
            self._collect()
            if self.substitution is not None and scored is not None and phase is Phase.DECODE:
                routing, top_k_index, top_k_weights = self._select(routing, top_k_index, top_k_weights, scored)
            plan = self._plan(routing)
            self._issue(0)
            self._prefetch(routing, hidden, plan)
            self.counters.plan_seconds += perf_counter() - started
            if phase is Phase.DECODE:
                return self._decode(plan, hidden, top_k_weights)
            return self._prefill(plan, hidden, top_k_weights)
        except BaseException:
            self._recover()
            raise

    # -- planning -----------------------------------------------------------------------------------------------------

    def _select(
        self, routing: Routing, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, scored: Scored
    ) -> tuple[Routing, torch.Tensor, torch.Tensor]:
        """Low-score experts that are missing give way to resident ones of like score."""
        asked, counters = self.substitution, self.counters
        assert asked is not None
        here = ExpertsAtHand(routing.layer, self.table)
        selection = substitute(routing, here, asked.alpha, share=asked.share, drop=asked.drop)
        counters.routes += sum(len(row) for row in routing.top_k_index)
        counters.low_score += selection.low_score
        counters.low_score_missing += selection.low_score_missing
        counters.top_score_missing += selection.top_score_missing
        counters.substituted += len(selection.replacements)
        if not selection.replacements:
            return routing, top_k_index, top_k_weights
        return with_substitutes(selection, routing, top_k_index, top_k_weights, scored, asked)

    def _plan(self, routing: Routing) -> LayerPlan:
        if self.table.staged:
            self._drop_stale(routing)
        self._eviction.observe(observation(routing))
        plan = plan_layer(routing, self.table, self._eviction, self._layer_share)
        self._count(plan, routing.phase)
        for promotion in plan.promotions:
            self.table.promote(promotion)
            if promotion.victim is not None:
                self._eviction.remove(promotion.victim)
            self._promoted.add(promotion.copy)  # a resident once it has served: in the order of the plan, as any other
        self._queue = deque(plan.loads)
        return plan

    def _prefetch(self, routing: Routing, hidden: torch.Tensor, plan: LayerPlan) -> None:
        predictor = self._predictors.get(routing.phase)
        if predictor is None or not plan.spare or len(self.table.ready) == self._experts:
            return
        if self.trial is not None and not self.trial.is_on and routing.phase is Phase.DECODE:
            return
        threads = torch.get_num_threads()
        if hidden.shape[0] == 1:
            torch.set_num_threads(1)  # a second thread would wait for a core that the readers are using
        predicted = predictor(routing.layer, hidden)
        torch.set_num_threads(threads)
        if predicted is None:
            return
        loads = plan_prefetch(predicted[0], predicted[1], self.table, plan).loads
        self.counters.prefetches += len(loads)
        self._queue.extend(loads)
        self._issue(0)

    def _count(self, plan: LayerPlan, phase: Phase) -> None:
        counters = self.counters
        counters.loads += len(plan.loads)
        if phase is Phase.DECODE:
            counters.decode_uses += len(plan.serves)
            counters.decode_hits += plan.hits
        else:
            counters.prefill_uses += len(plan.serves)
            counters.prefill_hits += plan.hits

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _issue(self, computed: int) -> None:
        """Start the loads whose slots are free, now that `computed` serves of the plan have ended."""
        queue = self._queue
        while queue and queue[0].after <= computed:
            load = queue.popleft()
            self.table.begin(load)
            if load.victim is not None:
                self._eviction.remove(load.victim)
            self._weights[load.slot] = self._bind(load)
            self._tickets[load.copy] = self._transfers.submit(load)

    def _bind(self, load: Load) -> Weights:
        """The weights that the load will bring, as views; made once for a slot and layout."""
        layer, expert, _ = load.copy
        placement = self._store.placement(layer, expert)
        key = (load.slot, placement.layout)
        weights = self._views.get(key)
        if weights is None:
            weights = self._views[key] = self._math[layer].bind(self._arena, load.slot, placement.parts)
        return weights

    def _arrive(self, copy: Copy) -> Weights:
        """Wait for a copy that is under way and take it in."""
        ticket = self._tickets[copy]
        if not ticket.is_over:
            self._transfers.urge(ticket)
            started = perf_counter()
            ticket.join()
            self.counters.wait_seconds += perf_counter() - started
        self._close(copy, ticket)
        if ticket.error is not None:
            raise ticket.error
        return self._ready(copy)

    def _close(self, copy: Copy, ticket: Ticket) -> None:
        """Book the end of a load."""
        del self._tickets[copy]
        if ticket.state is not State.DONE:
            self._promoted.discard(copy)
            self.table.fail(copy)
            return
        self.table.arrive(copy)
        if ticket.load.keep:
            self._eviction.insert(copy)
        if ticket.ready_event is not None:  # on a GPU: the device waits, not the host
            torch.cuda.current_stream(self._arena.device).wait_event(ticket.ready_event)

    def _collect(self) -> None:
        """Take in the prefetches that have ended since the last layer; a failed one is tried again on demand."""
        if self._tickets:
            for copy, ticket in list(self._tickets.items()):
                if ticket.is_over:
                    self._close(copy, ticket)

    def _drop_stale(self, routing: Routing) -> None:
        """Forget what was prefetched for this layer, or one before it, and is not wanted.

        A wrong guess that is being read is left alone in decode, where nobody needs its slot now, and dropped at a
        later layer; a prefill streams through these slots and waits for it.
        """
        layer, table = routing.layer, self.table
        wanted = {expert for row in routing.top_k_index for expert in row}
        for copy in list(table.staged):
            if copy[0] == layer and copy[1] in wanted:
                self.counters.prefetches_used += 1
                continue
            ticket = self._tickets.get(copy)
            if ticket is not None:
                if not self._transfers.cancel(ticket) and not ticket.is_over:
                    if routing.phase is Phase.DECODE:
                        continue
                    ticket.join()
                self._close(copy, ticket)
            if copy in table.ready:
                table.release(copy)

    def _recover(self) -> None:
        """After an error or an interrupt, wherever it struck: nothing is under way, only what is ready is kept."""
        self._transfers.drain()
        self._queue.clear()
        self._tickets.clear()
        self._promoted.clear()
        self.table.settle()
        resident, believed = self.table.ready.keys(), set(self._eviction.victims(len(self._weights), ()))
        for copy in sorted(believed - resident):
            self._eviction.remove(copy)
        for copy in sorted(resident - believed):
            self._eviction.insert(copy)

    # -- computing ----------------------------------------------------------------------------------------------------

    def _decode(self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Few tokens: in the plan's order, outputs kept apart, summed at the end in ascending expert order."""
        math, serves = self._math[plan.layer], plan.serves
        outputs: list[torch.Tensor] = []
        started, waited = perf_counter(), self.counters.wait_seconds
        if hidden.shape[0] == 1 and serves:
            stacked = self._one_token(plan, math, hidden)
            choices = [serve.routes[0] for serve in serves]
            stacked = (stacked * top_k_weights[0, choices].unsqueeze(1)).to(hidden.dtype)
            outputs = list(stacked.split(1))
        else:
            flat_weights = top_k_weights.reshape(-1, 1)
            for computed, serve in enumerate(serves, start=1):
                x, route = self._rows(serve, hidden, top_k_weights.shape[1])
                outputs.append((math.forward(x, self._weights_of(serve)) * flat_weights[route]).to(hidden.dtype))
                self._served(serve, computed)
        total = torch.zeros_like(hidden)
        for n in sorted(range(len(serves)), key=lambda n: serves[n].copy):
            if hidden.shape[0] == 1:
                total += outputs[n]
            else:
                total.index_add_(0, self._tokens(serves[n], top_k_weights.shape[1]), outputs[n])
        self.counters.compute_seconds += perf_counter() - started - (self.counters.wait_seconds - waited)
        return total

    def _one_token(self, plan: LayerPlan, math: ExpertMath, hidden: torch.Tensor) -> torch.Tensor:
        """One token through all its experts: [n, H] in the plan's order, routing weights not applied."""
        serves = plan.serves
        stacked = hidden.new_empty(len(serves), hidden.shape[1])
        here = sum(1 for serve in serves if not serve.loads)
        if any(load.after for load in plan.loads):
            here = min(here, 1)  # slots are so few that a load waits for the first expert computed
        weights = [self._ready(serve.copy) for serve in serves[:here]]
        self._compute_each(math, hidden, weights, stacked[:here], self.team)
        for computed, serve in enumerate(serves[:here], start=1):
            self._served(serve, computed)
        for computed, serve in enumerate(serves[here:], start=here + 1):
            math.forward_each(hidden, [self._weights_of(serve)], stacked[computed - 1 : computed])
            self._served(serve, computed)
        return stacked

    @staticmethod
    def _compute_each(
        math: ExpertMath, hidden: torch.Tensor, weights: Sequence[Weights], out: torch.Tensor, team: Team | None
    ) -> None:
        """One token [1, H] through several experts -> out [n, H], shared out over the team where there is one."""
        if team is not None and len(weights) > 1:
            team.run(lambda member, of: math.forward_each(hidden, weights[member::of], out[member::of]))
        elif weights:
            math.forward_each(hidden, weights, out)

    def _prefill(self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Many tokens: experts in ascending order, each read once, loads of this and the next layer running ahead."""
        math, total = self._math[plan.layer], torch.zeros_like(hidden)
        flat_weights = top_k_weights.reshape(-1, 1)
        started, waited = perf_counter(), self.counters.wait_seconds
        for computed, serve in enumerate(plan.serves, start=1):
            weights = self._weights_of(serve)
            x, route = self._rows(serve, hidden, top_k_weights.shape[1])
            y = (math.forward(x, weights) * flat_weights[route]).to(hidden.dtype)
            total.index_add_(0, self._tokens(serve, top_k_weights.shape[1]), y)
            self._served(serve, computed)
        self.counters.compute_seconds += perf_counter() - started - (self.counters.wait_seconds - waited)
        return total

    def _weights_of(self, serve: Serve) -> Weights:
        return self._ready(serve.copy) if serve.copy in self.table.ready else self._arrive(serve.copy)

    def _ready(self, copy: Copy) -> Weights:
        weights = self._weights[self.table.ready[copy]]
        assert weights is not None, copy
        return weights

    def _served(self, serve: Serve, computed: int) -> None:
        """A serve has been computed: a passing expert leaves, loads that waited for its slot start."""
        if serve.copy in self.table.staged:
            self.table.release(serve.copy)
        elif serve.copy in self._promoted:
            self._promoted.remove(serve.copy)
            self._eviction.insert(serve.copy)
        if self._queue:
            self._issue(computed)

    def _tokens(self, serve: Serve, width: int) -> torch.Tensor:
        return torch.tensor([route // width for route in serve.routes], device=self._arena.device)

    def _rows(self, serve: Serve, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of one expert [n, H] and its flat routes [n]."""
        return hidden[self._tokens(serve, width)], torch.tensor(serve.routes, device=self._arena.device)
