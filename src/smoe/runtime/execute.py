"""Carrying out one layer's plan on real hardware: start loads, compute what is here, wait for the rest, sum in fixed
order.

One layer in decode, time to the right; the CPU's line is there only beside a device with a memory of its own:

    reading threads   | load a ........ | load b ........ |  prefetch ...
    the CPU           | compute c ............ |
    computing thread  | plan | resident experts | look ahead | wait | a | wait | b | c | sum

The sum runs in ascending expert order whatever the order of arrival, so a result never depends on residency (grade E1,
and E0 on a CPU).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from smoe.config import EngineConfig
from smoe.expert import Copy
from smoe.kernels.crew import Crew
from smoe.memory.device import Arena
from smoe.memory.emulation import Emulation
from smoe.memory.store import ExpertStore
from smoe.memory.transfer import Ticket
from smoe.metrics import Counters
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan import LayerPlan, Serve
from smoe.policy.planner import LAST_TOKENS, layer_share, observation, plan_layer, plan_prefetch
from smoe.policy.residency import ExpertsAtHand, SlotTable
from smoe.policy.selection import substitute
from smoe.policy.trial import Shadow, Trial
from smoe.routing import Phase, Routing
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.expert_math import ExpertMath, Weights, library_products
from smoe.runtime.host_experts import Balancer, HostExperts
from smoe.runtime.substitution import Scored, Substitution, substitution_of, with_substitutes
from smoe.runtime.team import Team

_FromHost = Mapping[Copy, "Future[torch.Tensor]"]


class Predictor(Protocol):
    """Guesses what a later layer will want."""

    alpha: float
    """The substitution threshold that the layers are served with."""
    needs_partial: bool
    """Whether it looks ahead through what the resident experts have given, and so is asked only once they are done."""

    def __call__(
        self, layer: int, hidden: torch.Tensor, partial: torch.Tensor | None
    ) -> tuple[int, Sequence[int]] | None:
        """(layer, router input [T, H], experts' output so far [T, H]) -> (next layer, its experts, best first), or
        None."""


class LayerExecutor:
    """The experts of all layers on one device. Used by one thread at a time."""

    def __init__(
        self,
        *,
        store: ExpertStore,
        arrivals: Arrivals,
        arena: Arena,
        math: dict[int, ExpertMath],
        predictors: Mapping[Phase, Predictor],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.arrivals = arrivals
        self.table: SlotTable = arrivals.table
        self.team: Team | None = None
        """Where set, resident experts are shared out over several threads."""
        self.crew: Crew | None = None
        """Where set, our kernel multiplies single rows."""
        self.trial: Trial | None = None
        """Where set, says whether prefetching in decode pays at present."""
        self.trace: list[Routing] | None = None
        """Where set, every routing is appended: input for the simulator."""
        self.substitution: Substitution | None = None
        """Where set, missing low-score experts are replaced."""
        self.host_experts: HostExperts | None = None
        """Where set, the CPU beside the device, which can compute experts too."""
        self.balancer: Balancer | None = None
        """Where set, says which missing experts the CPU computes."""
        self.emulation: Emulation | None = None
        """Where set, the device is acted."""
        self.may_peek = True
        """Whether this pass may run another layer's attention: not where the caller listens to the layers."""
        self.shadow = Shadow()
        """Whether there is time to look ahead."""
        self._awaited: list[Ticket] = []
        """What the running layer still waited for when its resident experts were done."""
        self._residents_done = 0.0
        self._store = store
        self._arena = arena
        self._math = math
        self._predictors = predictors
        self.now = clock
        self._layer_share = layer_share(self.table.cache_slots, len(math))
        self._experts = len(store.keys())

    @property
    def device(self) -> torch.device:
        return self._arena.device

    @property
    def counters(self) -> Counters:
        return self.arrivals.counters

    @property
    def expert_bytes(self) -> int:
        return self._store.expert_bytes

    def hidden_size(self, layer: int) -> int:
        return self._math[layer].hidden

    def start_anew(self, eviction: Eviction) -> None:
        """Empty slots, no statistics, no counts: the engine's own trials at load are not the user's."""
        if self.host_experts is not None:
            self.host_experts.start_anew()
        if self.emulation is not None:
            self.emulation.late_seconds = 0.0
        self.shadow = Shadow()
        self.arrivals.start_anew(eviction)
        self.trial = Trial() if self.trial is not None else None

    def agrees(self, crew: Crew) -> bool:
        """Whether our kernel gives the library's bits on the experts that are resident, one of every layout."""
        seen = {(self._math[c[0]].hidden, self._math[c[0]].inner): c for c in sorted(self.table.ready)}
        return bool(seen) and all(self._math[c[0]].agrees(crew, self.arrivals.ready(c)) for c in seen.values())

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
        slots = [n % self.arrivals.slots for n in range(count)]
        weights = [self._math[layer].bind(self._arena, slot, placement.parts) for slot in slots]
        out = hidden.new_empty(count, hidden.shape[1])
        self._compute_each(self._math[layer], hidden, weights, out)
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
        try:
            if self.emulation is not None:
                self.emulation.reach_experts(hidden.shape[0])
            output = self._serve(layer, phase, hidden, top_k_index, top_k_weights, scored)
            if self.emulation is not None:
                self.emulation.leave_experts()
            return output
        except BaseException:
            self._recover()
            raise

    def _serve(
        self,
        layer: int,
        phase: Phase,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scored: Scored | None,
    ) -> torch.Tensor:
        started = self.now()
        rows = top_k_index.tolist()  # the one wait for the device in a layer: everything after depends on it
        choice = None if scored is None else scored.choice_of(LAST_TOKENS if phase is Phase.PREFILL else None)
        routing = Routing(layer, phase, self._store.layers[layer].experts, rows, choice)
        if self.trace is not None:
            self.trace.append(routing)
        self.arrivals.collect()
        if self.substitution is not None and scored is not None and phase is Phase.DECODE:
            routing, top_k_index, top_k_weights = self._select(routing, top_k_index, top_k_weights, scored)
        plan = self._plan(routing)
        self._prefetch(phase, hidden, None, plan)
        self.counters.plan_seconds += self.now() - started
        compute = self._decode if phase is Phase.DECODE else self._prefill
        return compute(plan, hidden, top_k_weights)

    def _recover(self) -> None:
        if self.host_experts is not None:
            self.host_experts.drain()
        self._awaited = []
        self.arrivals.recover()

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
        counters.prefetches_top_score += sum(
            copy[0] == routing.layer and copy[1] in selection.top for copy in self.table.staged
        )
        if not selection.replacements:
            return routing, top_k_index, top_k_weights
        return with_substitutes(selection, routing, top_k_index, top_k_weights, scored, asked)

    def _plan(self, routing: Routing) -> LayerPlan:
        if self.table.staged:
            self.arrivals.drop_stale(routing)
        self.arrivals.eviction.observe(observation(routing))
        balance = None if self.balancer is None else self.balancer.balance(self.arrivals.running)
        plan = plan_layer(routing, self.table, self.arrivals.eviction, self._layer_share, balance)
        self._count(plan, routing.phase)
        self.arrivals.adopt(plan)
        return plan

    def _prefetch(self, phase: Phase, hidden: torch.Tensor, partial: torch.Tensor | None, plan: LayerPlan) -> None:
        """Ask the predictor, where its time is now: before the experts, or, with `partial`, after the resident ones."""
        predictor = self._predictors.get(phase)
        if predictor is None or predictor.needs_partial is (partial is None):
            return
        if not plan.spare or len(self.table.ready) == self._experts:
            return
        if self.trial is not None and not self.trial.is_on and phase is Phase.DECODE:
            return
        threads = torch.get_num_threads()
        if hidden.shape[0] == 1:
            torch.set_num_threads(1)  # a second thread would wait for a core that the readers are using
        began = time.perf_counter()
        predicted = predictor(plan.layer, hidden, partial)
        torch.set_num_threads(threads)
        if self.emulation is not None and phase is Phase.DECODE and partial is None:
            self.emulation.ask_gate(began)
        if predicted is not None:
            self.arrivals.prefetch(plan_prefetch(predicted[0], predicted[1], self.table, plan).loads)

    def _look_ahead(self, plan: LayerPlan, hidden: torch.Tensor, partial: Callable[[], torch.Tensor]) -> None:
        """In the shadow of what the layer waits for: the next layer's router, on the experts' output so far."""
        predictor = self._predictors.get(Phase.DECODE)
        if predictor is None or not predictor.needs_partial or not self.may_peek:
            return
        self._awaited = self.arrivals.awaited(plan)
        self._residents_done = asked = self.now()
        if not self.shadow.fits(len(self._awaited)):
            return
        began = time.perf_counter()
        self._prefetch(Phase.DECODE, hidden, partial(), plan)
        if self.emulation is not None:
            self.emulation.look_ahead(began, hidden.shape[0])
        seconds = self.now() - asked
        self.shadow.note_cost(seconds)
        self.counters.look_aheads += 1
        self.counters.look_ahead_seconds += seconds

    def _measure_shadow(self) -> None:
        """How long the layer's loads took after the resident experts were done, now that all are over."""
        if self._awaited:
            seconds = max(ticket.ended for ticket in self._awaited) - self._residents_done
            self.shadow.note_wait(len(self._awaited), max(0.0, seconds))
            self._awaited = []

    def _count(self, plan: LayerPlan, phase: Phase) -> None:
        counters = self.counters
        counters.loads += len(plan.loads)
        if phase is Phase.DECODE:
            counters.decode_uses += len(plan.serves)
            counters.decode_hits += plan.hits
            counters.host_computed += sum(serve.on_host for serve in plan.serves)
        else:
            counters.prefill_uses += len(plan.serves)
            counters.prefill_hits += plan.hits

    # -- computing ----------------------------------------------------------------------------------------------------

    def _decode(self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Few tokens: in the plan's order, outputs kept apart, summed at the end in ascending expert order."""
        started, before = self.now(), self.counters.elsewhere_seconds
        from_host = self._start_host(plan, hidden, top_k_weights.shape[1])
        compute = self._one_token if hidden.shape[0] == 1 else self._some_tokens
        outputs = compute(plan, hidden, top_k_weights, from_host) if plan.serves else []
        self._measure_shadow()
        total = self._sum(plan.serves, outputs, hidden, top_k_weights.shape[1])
        self.counters.compute_seconds += self.now() - started - (self.counters.elsewhere_seconds - before)
        return total

    def _start_host(self, plan: LayerPlan, hidden: torch.Tensor, width: int) -> dict[Copy, Future[torch.Tensor]]:
        """What the CPU computes beside the device begins now."""
        if self.host_experts is None:
            return {}
        given = (serve for serve in plan.serves if serve.on_host)
        return {
            serve.copy: self.host_experts.submit(serve.copy, self._rows(serve, hidden, width)[0]) for serve in given
        }

    def _one_token(
        self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor, from_host: _FromHost
    ) -> list[torch.Tensor]:
        """One token through all its experts: [1, H] each, in the plan's order, routing weights applied."""
        math, serves = self._math[plan.layer], plan.serves
        stacked = hidden.new_empty(len(serves), hidden.shape[1])
        gains = top_k_weights[0, [serve.routes[0] for serve in serves]].unsqueeze(1)
        here = sum(1 for serve in serves if not serve.loads)
        if any(load.after for load in plan.loads):
            here = min(here, 1)  # slots are so few that a load waits for the first expert computed
        weights = [self.arrivals.ready(serve.copy) for serve in serves[:here]]
        began = time.perf_counter()
        self._compute_each(math, hidden, weights, stacked[:here])
        self._act([1] * here, began)
        for computed, serve in enumerate(serves[:here], start=1):
            self.arrivals.served(serve, computed)
        if here < len(serves):
            self._look_ahead(
                plan, hidden, lambda: (stacked[:here] * gains[:here]).to(hidden.dtype).sum(0, keepdim=True)
            )
        for computed, serve in enumerate(serves[here:], start=here + 1):
            row = stacked[computed - 1 : computed]
            if serve.on_host:
                row.copy_(self._from_host(from_host, serve))
                continue
            weights = [self.arrivals.weights_of(serve)]
            began = time.perf_counter()
            math.forward_each(hidden, weights, row)
            self._act([1], began)
            self.arrivals.served(serve, computed)
        return list((stacked * gains).to(hidden.dtype).split(1))

    def _some_tokens(
        self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor, from_host: _FromHost
    ) -> list[torch.Tensor]:
        """Several tokens through their experts: [n, H] each, in the plan's order, routing weights applied."""
        math, serves, width = self._math[plan.layer], plan.serves, top_k_weights.shape[1]
        flat_weights = top_k_weights.reshape(-1, 1)
        outputs: list[torch.Tensor] = []
        for computed, serve in enumerate(serves, start=1):
            if serve.loads and not (outputs and serves[computed - 2].loads):
                self._look_ahead(plan, hidden, lambda: self._sum(serves[: len(outputs)], outputs, hidden, width))
            x, route = self._rows(serve, hidden, width)
            if serve.on_host:
                y = self._from_host(from_host, serve)
            else:
                weights = self.arrivals.weights_of(serve)
                began = time.perf_counter()
                y = math.forward(x, weights)
                self._act([x.shape[0]], began)
            outputs.append((y * flat_weights[route]).to(hidden.dtype))
            if not serve.on_host:
                self.arrivals.served(serve, computed)
        return outputs

    def _from_host(self, from_host: _FromHost, serve: Serve) -> torch.Tensor:
        started = self.now()
        result = from_host[serve.copy].result()
        self.counters.host_wait_seconds += self.now() - started
        return result.to(self._arena.device)

    def _sum(
        self, serves: Sequence[Serve], outputs: Sequence[torch.Tensor], hidden: torch.Tensor, width: int
    ) -> torch.Tensor:
        """The experts' outputs added up in ascending expert order."""
        total = torch.zeros_like(hidden)
        for n in sorted(range(len(outputs)), key=lambda n: serves[n].copy):
            if hidden.shape[0] == 1:
                total += outputs[n]
            else:
                total.index_add_(0, self._tokens(serves[n], width), outputs[n])
        return total

    def _compute_each(
        self, math: ExpertMath, hidden: torch.Tensor, weights: Sequence[Weights], out: torch.Tensor
    ) -> None:
        """One token [1, H] through several experts -> out [n, H], shared out over the team where there is one."""
        if self.team is not None and len(weights) > 1:
            self.team.run(lambda member, of: math.forward_each(hidden, weights[member::of], out[member::of]))
        elif weights:
            math.forward_each(hidden, weights, out)

    def _prefill(self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Many tokens: experts in ascending order, each read once, loads of this and the next layer running ahead."""
        math, total = self._math[plan.layer], torch.zeros_like(hidden)
        flat_weights = top_k_weights.reshape(-1, 1)
        started, before = self.now(), self.counters.elsewhere_seconds
        for computed, serve in enumerate(plan.serves, start=1):
            weights = self.arrivals.weights_of(serve)
            x, route = self._rows(serve, hidden, top_k_weights.shape[1])
            began = time.perf_counter()
            y = (math.forward(x, weights) * flat_weights[route]).to(hidden.dtype)
            total.index_add_(0, self._tokens(serve, top_k_weights.shape[1]), y)
            self._act([x.shape[0]], began)
            self.arrivals.served(serve, computed)
        self.counters.compute_seconds += self.now() - started - (self.counters.elsewhere_seconds - before)
        return total

    def _act(self, rows: list[int], began: float) -> None:
        """On an emulated device: experts computed since `began` take the device's time."""
        if self.emulation is not None:
            self.emulation.compute_experts(began, rows)

    def _tokens(self, serve: Serve, width: int) -> torch.Tensor:
        return torch.tensor([route // width for route in serve.routes], device=self._arena.device)

    def _rows(self, serve: Serve, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of one expert [n, H] and its flat routes [n]."""
        return hidden[self._tokens(serve, width)], torch.tensor(serve.routes, device=self._arena.device)
