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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch

from smoe.config import EngineConfig
from smoe.memory.device import Arena
from smoe.memory.store import ExpertStore
from smoe.memory.transfer import Ticket
from smoe.metrics import Counters
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan import LayerPlan
from smoe.policy.planner import last_rows, layer_share, observation, plan_layer, plan_prefetch, real_rows
from smoe.policy.residency import ExpertsAtHand, ExpertsUnderWay, SlotTable
from smoe.policy.selection import substitute
from smoe.policy.trial import Shadow, Trial
from smoe.routing import Phase, Routing
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.expert_math import ExpertMath
from smoe.runtime.host_experts import Balancer
from smoe.runtime.layer_math import LayerMath
from smoe.runtime.substitution import Scored, Substitution, substitution_of, with_substitutes
from smoe.runtime.threads import threads

_SHADOWS = 8
"""Layers whose loads may be over only after the host has gone on: no more are kept in mind."""


class Predictor(Protocol):
    """Guesses what a later layer will want."""

    alpha: float
    """The substitution threshold that the layers are served with."""
    needs_partial: bool
    """Whether it looks ahead through what the resident experts have given, and so is asked only once they are done."""

    def __call__(
        self, layer: int, hidden: torch.Tensor, partial: torch.Tensor | None, rows: Sequence[int] | None
    ) -> tuple[int, Sequence[int]] | None:
        """(layer, router input [T, H], experts' output so far [T, H], rows that want something (None: all)) -> (next
        layer, its experts, best first), or None."""


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
        self.math = LayerMath(store, arrivals, arena, math, clock)
        self.trial: Trial | None = None
        """Where set, says whether prefetching in decode pays at present."""
        self.trace: list[Routing] | None = None
        """Where set, every routing is appended: input for the simulator."""
        self.substitution: Substitution | None = None
        """Where set, missing low-score experts are replaced."""
        self.balancer: Balancer | None = None
        """Where set, says which missing experts the CPU computes."""
        self.prefill_balance = True
        """Whether it does so for prompts too."""
        self.prefill_keep = "last-uses"
        """What decides which experts of a prompt stay (`policy/planner.py`)."""
        self.leaves_little = False
        """Whether our kernels have nearly all products of one token, so that the library needs one thread only."""
        self.shadow = Shadow()
        """Whether there is time to look ahead."""
        self._awaited: deque[tuple[list[Ticket], float]] = deque(maxlen=_SHADOWS)
        """Of the last layers, what each still waited for when its resident experts were done, and when that was."""
        self._store = store
        self._arena = arena
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

    def start_anew(self, eviction: Eviction) -> None:
        """Empty slots, no statistics, no counts: the engine's own trials at load are not the user's."""
        if self.math.host_experts is not None:
            self.math.host_experts.start_anew()
        if self.math.emulation is not None:
            self.math.emulation.late_seconds = 0.0
        self.shadow = Shadow()
        self._awaited.clear()
        self.arrivals.start_anew(eviction)
        self.trial = Trial() if self.trial is not None else None

    def substitute_by(self, config: EngineConfig) -> None:
        """From now on missing low-score experts are replaced, or not, as `config` says."""
        self.substitution = substitution_of(config)
        for predictor in self._predictors.values():
            predictor.alpha = config.alpha

    def run(
        self,
        layer: int,
        phase: Phase,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scored: Scored | None = None,
        sequences: int = 1,
    ) -> torch.Tensor:
        """The experts' share of a layer: hidden [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H].

        The T rows are `sequences` of equal length, one after the other.
        An error (a failed read, an interrupt) leaves the tables consistent; only this request is lost.
        """
        try:
            if self.math.emulation is not None:
                self.math.emulation.reach_experts(hidden.shape[0])
            output = self._serve(layer, phase, hidden, top_k_index, top_k_weights, scored, sequences)
            if self.math.emulation is not None:
                self.math.emulation.leave_experts()
            return output
        except BaseException:
            self.recover()
            raise

    def _serve(
        self,
        layer: int,
        phase: Phase,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scored: Scored | None,
        sequences: int,
    ) -> torch.Tensor:
        started = self.now()
        rows = top_k_index.tolist()  # the one wait for the device in a layer: everything after depends on it
        routing = Routing(layer, phase, self._store.layers[layer].experts, rows, None, sequences)
        if scored is not None:
            routing = routing._replace(scores=scored.choice_of(last_rows(routing) if phase is Phase.PREFILL else None))
        if self.device.type != "cpu":  # until here the device was computing: not our Python
            heard = self.now()
            self.counters.device_wait_seconds += heard - started
            started = heard
        if self.trace is not None:
            self.trace.append(routing)
        self.arrivals.collect()
        if self.substitution is not None and scored is not None and phase is Phase.DECODE:
            routing, top_k_index, top_k_weights = self._select(routing, top_k_index, top_k_weights, scored)
        plan, real = self._plan(routing), real_rows(routing)
        self._prefetch(phase, hidden, None, plan, real)
        self.counters.plan_seconds += self.now() - started
        if phase is Phase.PREFILL:
            return self.math.prefill(plan, hidden, top_k_weights)
        output = self.math.decode(plan, hidden, top_k_weights, partial(self._look_ahead, plan, hidden, real))
        self._measure_shadow()
        return output

    def recover(self) -> None:
        """After an error anywhere in a pass: nothing is under way, and the tables agree."""
        if self.math.host_experts is not None:
            self.math.host_experts.drain()
        self._awaited.clear()
        self.arrivals.recover()

    # -- planning -----------------------------------------------------------------------------------------------------

    def _select(
        self, routing: Routing, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, scored: Scored
    ) -> tuple[Routing, torch.Tensor, torch.Tensor]:
        """Low-score experts that are missing give way to resident ones of like score."""
        asked, counters = self.substitution, self.counters
        assert asked is not None
        here, under_way = ExpertsAtHand(routing.layer, self.table), ExpertsUnderWay(routing.layer, self.table)
        selection = substitute(routing, here, asked.alpha, share=asked.share, drop=asked.drop, under_way=under_way)
        counters.routes += sum(expert != routing.experts for row in routing.top_k_index for expert in row)
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
        is_shared = self.balancer is not None and (routing.phase is Phase.DECODE or self.prefill_balance)
        balance = self.balancer.balance(self.arrivals.running) if self.balancer is not None and is_shared else None
        plan = plan_layer(routing, self.table, self.arrivals.eviction, self._layer_share, balance, self.prefill_keep)
        self._count(plan, routing.phase)
        self.arrivals.adopt(plan)
        return plan

    def _prefetch(
        self,
        phase: Phase,
        hidden: torch.Tensor,
        partial: torch.Tensor | None,
        plan: LayerPlan,
        rows: Sequence[int] | None,
    ) -> None:
        """Ask the predictor, where its time is now: before the experts, or, with `partial`, after the resident ones."""
        predictor = self._predictors.get(phase)
        if predictor is None or predictor.needs_partial is (partial is None) or not self._has_room(phase, plan):
            return
        began = time.perf_counter()
        with threads(1) if hidden.shape[0] == 1 else nullcontext():  # a second would wait for a core that readers use
            predicted = predictor(plan.layer, hidden, partial, rows)
        if self.math.emulation is not None and phase is Phase.DECODE and partial is None:
            self.math.emulation.ask_gate(began)
        if predicted is not None:
            layer, experts = predicted
            wanted = sorted(experts) if phase is Phase.PREFILL else experts  # a prefill takes them in ascending order
            self.arrivals.prefetch(plan_prefetch(layer, wanted, self.table, plan).loads)

    def _has_room(self, phase: Phase, plan: LayerPlan) -> bool:
        """Whether a prefetch has somewhere to go and something to bring, and pays at present."""
        if not plan.spare or len(self.table.ready) == self._experts:
            return False
        return phase is Phase.PREFILL or self.trial is None or self.trial.is_on

    def _look_ahead(
        self, plan: LayerPlan, hidden: torch.Tensor, rows: Sequence[int] | None, output: Callable[[], torch.Tensor]
    ) -> None:
        """In the shadow of what the layer waits for: the next layer's router, on the experts' output so far."""
        predictor = self._predictors.get(Phase.DECODE)
        if predictor is None or not predictor.needs_partial:
            return
        if not self._has_room(Phase.DECODE, plan):
            return
        awaited, asked = self.arrivals.awaited(plan), self.now()
        if awaited:
            self._awaited.append((awaited, asked))
        if not self.shadow.fits(len(awaited)):
            return
        began = time.perf_counter()
        self._prefetch(Phase.DECODE, hidden, output(), plan, rows)
        if self.math.emulation is not None:
            self.math.emulation.look_ahead(began, hidden.shape[0])
        seconds = self.now() - asked
        self.shadow.note_cost(seconds)
        self.counters.look_aheads += 1
        self.counters.look_ahead_seconds += seconds

    def _measure_shadow(self) -> None:
        """How long a layer's loads took after its resident experts were done, once all are over.

        On a GPU that is some layers later: the device waits for them while the host goes on.
        """
        while self._awaited and all(ticket.is_over for ticket in self._awaited[0][0]):
            tickets, residents_done = self._awaited.popleft()
            seconds = max(ticket.ended for ticket in tickets) - residents_done
            self.shadow.note_wait(len(tickets), max(0.0, seconds))

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
            counters.prefill_host_computed += sum(serve.on_host for serve in plan.serves)
