"""Executes one layer's plan on hardware: starts loads, computes resident experts, waits for the others, sums in fixed
order.

One layer in decode, time to the right; the CPU's line exists only with a device that has its own memory:

    reading threads   | load a ........ | load b ........ |  prefetch ...
    the CPU           | compute c ............ |
    computing thread  | plan | resident experts | look ahead | wait | a | wait | b | c | sum
    predictor thread         | predict ... |  (where a predictor runs concurrently: `asking.py`)

The sum is in ascending order of experts, whatever the order of arrival, so a result never depends on residency (grade
E1, and E0 on a CPU).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from smoe.compute.unit import Sharer
from smoe.expert import LOW
from smoe.kernels.threads import threads
from smoe.memory.reading_threads import Ticket
from smoe.memory.streams import Waits
from smoe.metrics import Counters
from smoe.models.kv_cache import RowCache
from smoe.policy.eviction.base import Eviction
from smoe.policy.importance import Thresholds, scaled
from smoe.policy.plan import DEVICE, LayerPlan
from smoe.policy.plan_prefetch import has_prefetch_slots, plan_prefetch, plan_upgrades
from smoe.policy.prediction import ON_A_THREAD, Moment, Prediction, Predictor, Sight
from smoe.policy.residency import SlotTable
from smoe.policy.step import Decision, decide, layer_shares
from smoe.policy.substitution import Selection
from smoe.policy.trial import LookAheadTrial, Trial
from smoe.routing import Phase, Routing, last_rows, real_rows
from smoe.runtime.answer_costs import Answerer
from smoe.runtime.asking import Asking
from smoe.runtime.layer import LayerCompute
from smoe.runtime.observer import StepObserver
from smoe.runtime.rerouting import weights_with_substitutes
from smoe.runtime.step import Step
from smoe.runtime.substitution import EXACTLY, Substitution

_MOST_AWAITED = 8
"""The maximum number of recent layers whose loads may still run while the host computes later layers."""


_GUESSED = Thresholds(low=0.0)
"""Where misses are resolved within a budget, prefetches are low copies except for a token's first expert: a wrong one
costs a quarter, and most misses would be resolved by a low copy anyway."""


class LayerExecutor:
    """Computes the experts of all layers on one device. One thread at a time may use it."""

    def __init__(
        self,
        *,
        compute: LayerCompute,
        predictors: Mapping[Phase, Predictor] = MappingProxyType({}),
        substitution: Substitution = EXACTLY,
        balancer: Sharer | None = None,
        trial: Trial | None = None,
        upgrades: bool = False,
    ) -> None:
        """`balancer` decides which missing experts other units compute (None: none). `trial` decides whether
        prefetching in decode pays (None: always). `upgrades`: whether idle time of the disk or link is used to load
        full copies of experts that low copies compute."""
        self.compute = compute
        self.arrivals = compute.arrivals
        self.table: SlotTable = self.arrivals.table
        self.trial = trial
        self.upgrades = upgrades
        self.answerer: Answerer | None = None
        """Resolves the misses of decode steps within a budget; None: `substitution` decides."""
        self.substitution = substitution
        self.waits = Waits()
        """The device's waits since the engine was made, without those for look-aheads (`Counters.look_aheads`)."""
        self.observers: list[StepObserver] = []
        """Observers of every step, such as `smoe.trace` and measurements."""
        self.look_ahead_trial = LookAheadTrial()
        """Decides whether there is time for a look-ahead."""
        self.now = compute.pacing.now
        self._balancer = balancer
        self._predictors = predictors
        self._observers = list({id(predictor): predictor for predictor in predictors.values()}.values())
        self._awaited: deque[tuple[list[Ticket], float]] = deque(maxlen=_MOST_AWAITED)
        """For each of the last layers, the loads that it waited for when its resident experts were done, and the time
        of that."""
        self.share_slots()
        self._experts = len(compute.store.keys())
        self._asking = Asking()

    @property
    def device(self) -> torch.device:
        return self.compute.device

    @property
    def helpers(self) -> list[Any]:
        """Threads that end with the engine; they do not refer to it."""
        return [*self.compute.helpers, *(helper for predictor in self._observers for helper in predictor.helpers)]

    @property
    def counters(self) -> Counters:
        return self.arrivals.counters

    def share_slots(self) -> None:
        """Divide the slots among the layers again after their number has changed."""
        self._layer_shares = layer_shares(self.table, list(self.compute.store.layers))

    def reset(self, eviction: Eviction) -> None:
        """Reset slots, statistics and counters, so that measurements during loading do not count."""
        self.compute.reset()
        self.look_ahead_trial = LookAheadTrial()
        self._awaited.clear()
        self.arrivals.reset(eviction)
        self.trial = Trial() if self.trial is not None else None
        if self.answerer is not None:
            self.answerer.reset()

    def substitute_by(self, substitution: Substitution) -> None:
        """Replace missing low-score experts according to `substitution` from now on."""
        self.substitution = substitution
        thresholds = substitution.switches.thresholds
        if self.answerer is not None and self.table.has_low:
            thresholds = _GUESSED
        for predictor in self._observers:
            predictor.alpha = substitution.switches.alpha
            predictor.thresholds = thresholds

    def guess_by(self, predictor: Predictor | None) -> None:
        """Let `predictor` decide what decode steps prefetch from now on; None: nothing."""
        predictors: dict[Phase, Predictor] = dict(self._predictors)
        predictors.pop(Phase.DECODE, None)
        if predictor is not None:
            predictors[Phase.DECODE] = predictor
        self._predictors = predictors
        self._observers = list({id(of): of for of in self._predictors.values()}.values())

    @contextmanager
    def by_low_copies(self) -> Iterator[None]:
        """Compute all experts with low copies for the duration of the `with` block, without substitution or dropping;
        for tests and quality costs."""
        before, answerer = self.substitution, self.answerer
        self.substitution, self.answerer = EXACTLY._replace(switches=EXACTLY.switches._replace(low_use="only")), None
        try:
            with self.unbalanced():
                yield
        finally:
            self.substitution, self.answerer = before, answerer

    @contextmanager
    def unbalanced(self) -> Iterator[None]:
        """Let the CPU compute no experts in parallel with the device, for the duration of the `with` block."""
        balancer, self._balancer = self._balancer, None
        try:
            yield
        finally:
            self._balancer = balancer

    def run(self, step: Step) -> torch.Tensor:
        """Return the sum of a layer's experts, weighted: [T, H].

        An error (a failed read, an interrupt) leaves the tables consistent and affects this request only.
        """
        pacing = self.compute.pacing
        try:
            pacing.reach_experts(step.hidden.shape[0])
            output = self._serve(step)
            pacing.leave_experts()
            return output
        except BaseException:
            self.recover()
            raise

    def _serve(self, step: Step) -> torch.Tensor:
        started, phase, hidden = self.now(), step.phase, step.hidden
        routing = self._routing_of(step)
        if self.device.type != "cpu":  # the time until here is the device's, not that of our Python code
            computed_at = self.now()
            self.counters.device_wait_seconds += computed_at - started
            started = computed_at
        planning = self.compute.pacing.begin_planning()
        self.arrivals.collect()
        decision = self._decide(routing)
        top_k_weights = step.top_k_weights
        if decision.selection is not None and decision.selection.replacements and step.scored is not None:
            top_k_weights = weights_with_substitutes(decision, top_k_weights, step.scored, self.substitution)
        plan, real = decision.plan, real_rows(decision.routing)
        self.compute.pacing.end_planning(planning)
        self._prefetch(phase, Sight(step.layer, hidden, None, real), plan)
        if self.table.has_low and phase is Phase.DECODE:
            self._upgrade(decision)
        self.counters.plan_seconds += self.now() - started
        if phase is Phase.PREFILL:
            return self.compute.prefill(plan, hidden, top_k_weights)
        if self.compute.spinning_pool is not None:
            self.compute.spinning_pool.expect_readers(not self._is_all_here)
        on_look = partial(self._look_for_answer, plan) if self._asking.is_open else None
        look_ahead = partial(self._look_ahead, plan, hidden, real)
        output = self.compute.decode(plan, hidden, top_k_weights, look_ahead, on_look)
        self._take_answer(plan, waits=True)  # no other thread uses the predictor when it observes the next router
        self._measure_look_ahead()
        return output

    def _routing_of(self, step: Step) -> Routing:
        """Return the router's choice in the policies' form, after the predictors have observed it."""
        rows = self.waits.fetch("choice", step.top_k_index)  # the only wait of a layer: all else depends on it
        experts = self.compute.store.layers[step.layer].experts
        routing = Routing(step.layer, step.phase, experts, rows, None, step.sequences)
        if step.scored is not None:
            scores = step.scored.choice_of(last_rows(routing) if step.phase is Phase.PREFILL else None)
            routing = routing._replace(scores=self.waits.fetch("scores", scores))
        if self.substitution.switches.needs_weights or self.answerer is not None:
            routing = routing._replace(weights=scaled(self.waits.fetch("weights", step.top_k_weights)))
        for predictor in self._observers:
            predictor.observe(routing)
            predictor.observe_input(routing, step.hidden)
        return routing

    def begin_pass(self, ids: torch.Tensor | None, cache: RowCache | None) -> None:
        """Start a forward pass over the tokens `ids` [rows, new positions], which follow those in the cache."""
        self.compute.pacing.begin_pass()
        if self._balancer is not None:
            self._balancer.begin_pass(0 if cache is None else cache.length)
        if self.trial is None or self.trial.is_on:
            for predictor in self._observers:
                predictor.begin(ids, cache)

    def recover(self) -> None:
        """Restore consistency after an error at any point of a pass: no load is in flight, and the tables agree."""
        self._asking.drain()
        self.compute.recover()
        self._awaited.clear()
        self.arrivals.recover()

    def close(self) -> None:
        """End the helper threads."""
        self._asking.close()
        self.compute.close()

    # -- planning -----------------------------------------------------------------------------------------------------

    def _decide(self, routing: Routing) -> Decision:
        """Decide the plan, count it, and start its loads."""
        balancer, answerer = self._balancer, self.answerer
        decision = decide(
            routing,
            self.table,
            self.arrivals.eviction,
            self._layer_shares[routing.layer],
            self.substitution.switches,
            None if balancer is None else lambda: balancer.balance(routing, self.arrivals.running),
            self.arrivals.drop_stale,
            None if answerer is None else lambda routing, table: answerer.answer(routing, table, self.arrivals.running),
        )
        counters, table = self.counters, self.table
        if decision.selection is not None:
            _count_selection(counters, decision.selection, routing, table, answerer is not None)
        _count_decision(counters, decision, routing, table.has_low)
        for observer in self.observers:
            observer.planned(routing, decision)
        self.arrivals.adopt(decision.plan)
        return decision

    def _prefetch(self, phase: Phase, sight: Sight, plan: LayerPlan) -> None:
        """Run the predictor if this is its moment, or start it concurrently with the experts."""
        predictor = self._predictors.get(phase)
        moments = (Moment.ROUTED, *ON_A_THREAD) if sight.partial is None else (Moment.RESIDENTS_DONE,)
        if predictor is None or predictor.asked not in moments or not self._has_room(phase, plan):
            return
        if predictor.asked in ON_A_THREAD:
            self._asking.begin(predictor, sight)
            return
        moment = predictor.asked
        began, is_single = time.perf_counter(), sight.hidden.shape[0] == 1
        with threads(1) if is_single else nullcontext():  # a second would wait for a reading thread's core
            predictions = predictor.predict(sight)
        pacing = self.compute.pacing
        if moment is Moment.RESIDENTS_DONE:
            pacing.look_ahead(began, sight.hidden.shape[0])
        elif phase is Phase.DECODE:
            pacing.ask_gate(began)
        if phase is Phase.PREFILL:  # which takes them in ascending order
            predictions = [named._replace(experts=sorted(named.experts)) for named in predictions]
        self._bring(predictions, plan)

    def _bring(self, predictions: Iterable[Prediction], plan: LayerPlan) -> None:
        planning = self.compute.pacing.begin_planning()
        if self._balancer is not None:
            predictions = self._balancer.guess(predictions)
        self.arrivals.prefetch(plan_prefetch(predictions, self.table, plan))
        self.compute.pacing.end_planning(planning)

    def _look_for_answer(self, plan: LayerPlan, computed: int) -> None:
        if computed or self._predictors[Phase.DECODE].asked is Moment.CONCURRENT:
            self._take_answer(plan, waits=False)

    def _take_answer(self, plan: LayerPlan, waits: bool) -> None:
        """Start the loads of a concurrent prediction, if it is there."""
        asked = self.now()
        predictions = self._asking.take(waits)
        if predictions is None:
            return
        self._bring(predictions, plan)
        self.counters.look_ahead_seconds += self.now() - asked

    def _upgrade(self, decision: Decision) -> None:
        """Start loads of full copies for experts that low copies compute: where routes need them, or in idle time. Not
        where low copies compute all experts for a measurement."""
        if self.substitution.switches.low_use == "only":
            return
        is_idle = self.upgrades and not self.table.inflight
        loads = plan_upgrades(decision.routing, decision.plan, self.table, self.arrivals.eviction, is_idle)
        self.counters.upgrades += len(loads)
        self.arrivals.bring(loads)

    def _has_room(self, phase: Phase, plan: LayerPlan) -> bool:
        """Return whether a prefetch has a free slot and something to load, and pays at present."""
        if self._is_all_here or not has_prefetch_slots(self.table, plan):
            return False
        return phase is Phase.PREFILL or self.trial is None or self.trial.is_on

    @property
    def _is_all_here(self) -> bool:
        """Whether every expert is resident, so that nothing is read. Always false where there are low copies, which
        would be unused with such a budget."""
        return not self.table.has_low and len(self.table.ready) == self._experts

    def _look_ahead(
        self, plan: LayerPlan, hidden: torch.Tensor, rows: Sequence[int] | None, output: Callable[[], torch.Tensor]
    ) -> None:
        """Apply the next layer's router to the experts' output so far, while the layer waits for loads."""
        predictor = self._predictors.get(Phase.DECODE)
        if predictor is None or predictor.asked is not Moment.RESIDENTS_DONE:
            return
        if not self._has_room(Phase.DECODE, plan):
            return
        awaited, asked = self.arrivals.awaited(plan), self.now()
        if awaited:
            self._awaited.append((awaited, asked))
        if not self.look_ahead_trial.fits(len(awaited)):
            return
        self._prefetch(Phase.DECODE, Sight(plan.layer, hidden, output(), rows), plan)
        seconds = self.now() - asked
        self.look_ahead_trial.note_cost(seconds)
        self.counters.look_aheads += 1
        self.counters.look_ahead_seconds += seconds

    def _measure_look_ahead(self) -> None:
        """Measure how long a layer's loads took after its resident experts were done, once all have ended.

        On a GPU that is some layers later: the device waits for them while the host goes on.
        """
        while self._awaited and all(ticket.is_over for ticket in self._awaited[0][0]):
            tickets, residents_done = self._awaited.popleft()
            seconds = max(ticket.ended for ticket in tickets) - residents_done
            self.look_ahead_trial.note_wait(len(tickets), max(0.0, seconds))


def _count_selection(
    counters: Counters, selection: Selection, routing: Routing, table: SlotTable, is_answered: bool
) -> None:
    """Count missing and replaced experts. `is_answered`: misses are resolved within a budget."""
    none = routing.experts
    counters.routes += sum(expert != none for row in routing.top_k_index for expert in row)
    counters.low_score += selection.low_score
    counters.low_score_missing += selection.low_score_missing
    counters.top_score_missing += selection.top_score_missing
    by_others = [entry for entry in selection.replacements if entry.substitute is not None]
    counters.substituted += len(by_others if is_answered else selection.replacements)
    counters.prefetches_top_score += sum(key[0] == routing.layer and key[1] in selection.top for key in table.staged)


def _count_decision(counters: Counters, decision: Decision, routing: Routing, has_low: bool) -> None:
    """Count a plan's computed experts, by where they were, and its loads."""
    plan = decision.plan
    elsewhere = sum(serve.unit != DEVICE for serve in plan.serves)
    counters.loads += len(plan.loads)
    if has_low and routing.phase is Phase.DECODE:
        counters.low_served += sum(serve.key[2] == LOW for serve in plan.serves)
        counters.low_loads += sum(load.key[2] == LOW for load in plan.loads)
    if routing.phase is Phase.DECODE:
        counters.skipped += decision.skipped
        counters.decode_uses += len(plan.serves)
        counters.decode_hits += plan.hits
        counters.host_computed += elsewhere
    else:
        counters.prefill_uses += len(plan.serves)
        counters.prefill_hits += plan.hits
        counters.prefill_host_computed += elsewhere
