"""Executes a layer's plan: starts loads of missing experts, computes resident experts, waits for the loads, and sums
the experts' outputs in a fixed order.

One layer in decode, time to the right. The line of the CPU exists only on a machine with a device that has its own
memory. The letters a, b and c are experts; a and b are loaded, and the CPU computes c:

    reading threads     | load a ........ | load b ........ |  prefetch ...
    the CPU             | compute c ............ |
    computing thread    | plan | resident experts | look ahead | wait | a | wait | b | c | sum
    predictor thread         | predict ... |    (where a predictor runs concurrently: `prefetching.py`)

Small experts are computed together when the last of them has arrived (`layer.py`).

The sum is in ascending order of experts, in whatever order they arrive, so a result never depends on residency (grade
E1, and E0 on a CPU).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from smoe.compute.unit import Sharer
from smoe.expert import EXACT, LOW
from smoe.metrics import Counters
from smoe.models.kv_cache import RowCache
from smoe.policy.eviction.base import Eviction
from smoe.policy.importance import Thresholds, scaled
from smoe.policy.plan import DEVICE
from smoe.policy.plan_prefetch import plan_upgrades
from smoe.policy.prediction import Grading, Prediction, Predictor
from smoe.policy.residency import SlotTable
from smoe.policy.step import EXACT_SWITCHES, Decision, decide, layer_shares
from smoe.policy.substitution import Selection
from smoe.policy.trial import Trial
from smoe.routing import Phase, Routing, last_rows
from smoe.runtime.answer_costs import Answerer
from smoe.runtime.layer import NOTHING, LayerCompute, Meanwhile
from smoe.runtime.observer import StepObserver
from smoe.runtime.prefetching import Prefetching
from smoe.runtime.rerouting import weights_with_substitutes
from smoe.runtime.step import Step
from smoe.runtime.substitution import EXACTLY, Substitution

_GUESSED = Thresholds(low=0.0)
"""If misses are resolved within a quality budget, prefetches load low-precision copies, except for a token's first
expert. A wrong prefetch then costs a quarter of the bytes, and most misses would be resolved by a low-precision copy
anyway."""


class Planned(NamedTuple):
    """The decision about a layer, and its routing weights, before the layer's experts are computed."""

    decision: Decision
    top_k_weights: torch.Tensor
    """[T, K], those of substitutes among them."""


class LayerExecutor:
    """Computes the experts of all layers on one device. Only one thread at a time may use it."""

    def __init__(
        self,
        *,
        compute: LayerCompute,
        predictors: Mapping[Phase, Predictor] = MappingProxyType({}),
        substitution: Substitution = EXACTLY,
        answerer: Answerer | None = None,
        balancer: Sharer | None = None,
        trial: Trial | None = None,
        upgrades: bool = False,
    ) -> None:
        """`answerer`: resolves the misses of decode steps within a quality budget; None: `substitution` resolves them.
        `balancer`: decides which missing experts other compute units compute; None: the device computes all. `trial`:
        decides whether prefetching in decode pays; None: prefetching always runs. `upgrades`: whether idle time of the
        disk or link is used to load full-precision copies of experts that low-precision copies compute."""
        self.compute = compute
        self.arrivals = compute.arrivals
        self.table: SlotTable = self.arrivals.table
        self.device = compute.device
        self.upgrades = upgrades
        self.waits = Waits()
        """The device's waits since the engine was made, without those for look-aheads (`Counters.look_aheads`)."""
        self.observers: list[StepObserver] = []
        """Observers of every step, such as `smoe.trace` and measurements."""
        self.now = compute.pacing.now
        self._leaves_filling: Callable[[], bool] | None = None
        self._is_filled_later = False
        """Whether the running pass leaves free cache slots free."""
        self._balancer = balancer
        self.prefetching = Prefetching(predictors, self.arrivals, compute.pacing, self._guess, trial)
        self.predict_by(predictors)
        self._resolve_by(substitution, answerer)
        self.substitute_by(substitution)
        self.share_slots()

    @property
    def helpers(self) -> list[Any]:
        """Objects whose threads end with the engine; they must not refer to the engine."""
        return [*self.compute.helpers, *(helper for predictor in self._all for helper in predictor.helpers)]

    @property
    def counters(self) -> Counters:
        return self.arrivals.counters

    def add_observer(self, observer: StepObserver) -> None:
        """Call the methods of `observer` for every step of every layer from now on."""
        self.observers = [*self.observers, observer]  # a new list: a step may be using the old one

    def remove_observer(self, observer: StepObserver) -> None:
        """Stop calling the methods of `observer`."""
        self.observers = [each for each in self.observers if each is not observer]

    def share_slots(self) -> None:
        """Divide the slots among the layers again. Call this after the number of slots has changed."""
        self._layer_shares = layer_shares(self.table, list(self.arrivals.stores[EXACT].layers))

    def reset(self, eviction: Eviction) -> None:
        """Empty the slots and reset statistics and counters, so that measurements during loading do not count."""
        self.compute.reset()
        self.prefetching.reset()
        self.arrivals.reset(eviction)
        if self.answerer is not None:
            self.answerer.reset()

    def substitute_by(self, substitution: Substitution) -> None:
        """From now on, replace missing experts whose routing score is low, according to the settings `substitution`."""
        self._resolve_by(substitution, self.answerer)
        thresholds = substitution.switches.thresholds
        if self.answerer is not None and self.table.has_low:
            thresholds = _GUESSED
        for predictor in self._all:
            predictor.grade_by(Grading(substitution.switches.alpha, thresholds))

    def _resolve_by(self, substitution: Substitution, answerer: Answerer | None) -> None:
        """From now on, resolve misses by `answerer` in decode steps, or by `substitution` if `answerer` is None."""
        self.substitution, self.answerer = substitution, answerer
        self._needs_weights = substitution.switches.needs_weights or answerer is not None

    def predict_by(self, predictors: Mapping[Phase, Predictor]) -> None:
        """From now on, prefetch the experts that `predictors`, one per phase, predict. A phase without a predictor
        prefetches nothing."""
        prefetching = self.prefetching
        prefetching.use(predictors)
        self._prefetch = {phase: prefetching.begin if phase in predictors else _prefetch_nothing for phase in Phase}
        self._all = list({id(predictor): predictor for predictor in predictors.values()}.values())
        self._observing = [predictor for predictor in self._all if predictor.observes]

    def guess_by(self, predictor: Predictor | None) -> None:
        """From now on, prefetch in decode steps the experts that `predictor` predicts; None turns this prefetching
        off."""
        predictors = dict(self.prefetching.predictors)
        predictors.pop(Phase.DECODE, None)
        if predictor is not None:
            predictors[Phase.DECODE] = predictor
        self.predict_by(predictors)

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Load all missing experts during the `with` block, without substitution or dropping."""
        before, answerer = self.substitution, self.answerer
        self._resolve_by(EXACTLY, None)
        self.substitute_by(EXACTLY)
        try:
            yield
        finally:
            self._resolve_by(before, answerer)
            self.substitute_by(before)

    @contextmanager
    def by_low_copies(self) -> Iterator[None]:
        """Compute all experts from their low-precision copies during the `with` block, without substitution or
        dropping. For tests and for measurements of quality cost."""
        before, answerer = self.substitution, self.answerer
        self._resolve_by(EXACTLY._replace(switches=EXACT_SWITCHES._replace(low_use="only")), None)
        try:
            with self.unbalanced():
                yield
        finally:
            self._resolve_by(before, answerer)

    @contextmanager
    def unbalanced(self) -> Iterator[None]:
        """Compute all experts on the device during the `with` block, none on the CPU in parallel."""
        balancer, self._balancer = self._balancer, None
        try:
            yield
        finally:
            self._balancer = balancer

    def run(self, step: Step) -> torch.Tensor:
        """Return the weighted sum of a layer's experts, [T, H].

        After an error (a failed read, an interrupt) the slot table is consistent, and only this request fails.
        """
        try:
            return self._serve(step)
        except BaseException:
            self.recover()
            raise

    def _serve(self, step: Step) -> torch.Tensor:
        started, phase = self.now(), step.phase
        routing = self._routing_of(step)
        if self.device.type != "cpu":  # until here our Python code has only waited for the device
            computed_at = self.now()
            self.counters.device_wait_seconds += computed_at - started
            started = computed_at
        decision, top_k_weights = self._plan(step, routing)
        plan = decision.plan
        meanwhile = self._prefetch[phase](step, decision)
        if self.table.has_low and phase is Phase.DECODE:
            self._upgrade(decision)
        self.counters.plan_seconds += self.now() - started
        self.compute.experts.adapt(not self.arrivals.is_all_here, phase is Phase.PREFILL)
        if phase is Phase.PREFILL:
            return self.compute.prefill(plan, step.hidden, top_k_weights)
        output = self.compute.decode(plan, step.hidden, top_k_weights, meanwhile)
        meanwhile.end()
        return output

    def _routing_of(self, step: Step) -> Routing:
        """Return the router's choice in a step, as the object that policies take. Every predictor observes the choice
        first."""
        rows = self.waits.fetch("choice", step.top_k_index)  # the only wait of a layer: all else needs the choice
        experts = self.arrivals.stores[EXACT].layers[step.layer].experts
        routing = Routing(step.layer, step.phase, experts, rows, None, step.sequences)
        if step.scored is not None:
            scores = step.scored.choice_of(last_rows(routing) if step.phase is Phase.PREFILL else None)
            routing = routing._replace(scores=self.waits.fetch("scores", scores))
        if self._needs_weights:
            routing = routing._replace(weights=scaled(self.waits.fetch("weights", step.top_k_weights)))
        for predictor in self._observing:
            predictor.observe(routing)
            predictor.observe_input(routing, step.hidden)
        return routing

    def leave_filling(self, is_cached: Callable[[], bool]) -> None:
        """Leave free cache slots free in the first pass, if `is_cached()` is true when it begins. They are then filled
        while no text is computed."""
        self._leaves_filling = is_cached

    def begin_pass(self, ids: torch.Tensor | None, cache: RowCache | None) -> None:
        """Start a forward pass over the tokens `ids` [rows, new positions], which follow the tokens in `cache`."""
        is_first = self.counters.forward_passes == 0
        self._is_filled_later = is_first and self._leaves_filling is not None and self._leaves_filling()
        if self._balancer is not None:
            self._balancer.begin_pass(0 if cache is None else cache.length)
        if self.prefetching.is_on:
            for predictor in self._all:
                predictor.begin(ids, cache)

    def recover(self) -> None:
        """Restore a consistent state after an error at any point of a pass: no load is in flight, and the slot table
        agrees with the slots."""
        self.prefetching.recover()
        self.compute.recover()
        self.arrivals.recover()

    def close(self) -> None:
        """End the helper threads of prediction and computation."""
        self.prefetching.close()
        self.compute.close()

    # -- planning -----------------------------------------------------------------------------------------------------

    def _plan(self, step: Step, routing: Routing) -> Planned:
        """Return the decision about a layer and its routing weights. Loads that have ended are recorded first, and the
        loads of the layer's plan are started."""
        self.arrivals.collect()
        decision = self._decide(routing)
        top_k_weights = step.top_k_weights
        if decision.selection is not None and decision.selection.replacements and step.scored is not None:
            top_k_weights = weights_with_substitutes(decision, top_k_weights, step.scored, self.substitution)
        return Planned(decision, top_k_weights)

    def _decide(self, routing: Routing) -> Decision:
        """Return the decision about a layer (its plan and substitutes). Also add the decision to the counters and start
        the plan's loads."""
        balancer, answerer = self._balancer, self.answerer
        decision = decide(
            routing,
            self.table,
            self.arrivals.eviction,
            0 if self._is_filled_later else self._layer_shares[routing.layer],
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

    def _upgrade(self, decision: Decision) -> None:
        """Start loads of full-precision copies of experts that low-precision copies compute: of the experts that this
        step uses, and of others while nothing is in flight. Do nothing during a measurement that computes all experts
        from low-precision copies."""
        if self.substitution.switches.low_use == "only":
            return
        is_idle = self.upgrades and not self.table.inflight
        loads = plan_upgrades(decision.routing, decision.plan, self.table, self.arrivals.eviction, is_idle)
        self.counters.upgrades += len(loads)
        self.arrivals.bring(loads)

    def _guess(self, predictions: Iterable[Prediction]) -> Iterable[Prediction]:
        """Pass predicted experts to the compute units that prefetch them. Return the predictions that this machine
        should prefetch."""
        return predictions if self._balancer is None else self._balancer.guess(predictions)


def _prefetch_nothing(step: Step, decision: Decision) -> Meanwhile:
    """Do nothing, for a phase that has no predictor."""
    del step, decision
    return NOTHING


class Waits(Counter[str]):
    """Counts how often the computing thread has waited for the device, by purpose. Each wait lasts until all work that
    was enqueued before it is done. All waits within a layer go through this class."""

    def fetch(self, what: str, x: torch.Tensor) -> list[Any]:
        """Return the values of a tensor on the computing device. Counts one wait for the purpose `what`."""
        self[what] += 1
        numbers: list[Any] = x.tolist()
        return numbers


def _count_selection(
    counters: Counters, selection: Selection, routing: Routing, table: SlotTable, is_answered: bool
) -> None:
    """Add the missing and the replaced experts of a step to the counters. `is_answered`: whether misses are resolved
    within a quality budget."""
    none = routing.experts
    counters.routes += sum(expert != none for row in routing.top_k_index for expert in row)
    counters.low_score += selection.low_score
    counters.low_score_missing += selection.low_score_missing
    counters.top_score_missing += selection.top_score_missing
    by_others = [entry for entry in selection.replacements if entry.substitute is not None]
    counters.substituted += len(by_others if is_answered else selection.replacements)
    counters.prefetches_top_score += sum(key[0] == routing.layer and key[1] in selection.top for key in table.staged)


def _count_decision(counters: Counters, decision: Decision, routing: Routing, has_low: bool) -> None:
    """Add a plan's loads and computed experts to the counters, by where the experts were (in a slot, on disk, on
    another unit)."""
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
