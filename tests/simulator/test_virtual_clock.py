"""The virtual clock against `replay`, against sums written down by hand, and against a second, simpler clock.

Would catch: plans that differ from the engine's because loads take time, a load that two layers pay for, a prefetch
that delays what a layer waits for, a wrong guess that is never dropped.
"""

from __future__ import annotations

import random

import pytest

from smoe.policy.answering import Answering
from smoe.policy.importance import Thresholds
from smoe.policy.plan_progress import carry_out
from smoe.policy.prediction import Grading, Moment, Prediction, Sight
from smoe.policy.prices import LayerPrices, PriceTable
from smoe.policy.quality_budget import QualityBudget, TimeBudget
from smoe.policy.registry import ONLINE_EVICTION, make_eviction
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import EXACT_SWITCHES, decide, layer_share
from smoe.routing import Phase, Routing
from smoe.simulator.foresight import Foresight
from smoe.simulator.replay import replay
from smoe.simulator.virtual_clock import StepTimes, Timed, VirtualClock, replay_on_clock

LAYERS, EXPERTS, TOP_K, STEPS = 4, 16, 3, 60
EXPERT, LAYER, LOAD = 0.25, 1.0, 4.0


def trace(seed: int = 1, rows: int = 1) -> list[Routing]:
    """A prompt, then decode steps of skewed popularity."""
    chance = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(EXPERTS)]

    def chosen() -> list[int]:
        found: list[int] = []
        while len(found) < TOP_K:
            expert = chance.choices(range(EXPERTS), weights)[0]
            found += [expert] if expert not in found else []
        return found

    def scores() -> list[list[float]]:
        return [[chance.random() for _ in range(EXPERTS)] for _ in range(rows)]

    prompt = [Routing(layer, Phase.PREFILL, EXPERTS, [chosen() for _ in range(8)]) for layer in range(LAYERS)]
    decode = [
        Routing(layer, Phase.DECODE, EXPERTS, [chosen() for _ in range(rows)], scores(), rows)
        for _ in range(STEPS)
        for layer in range(LAYERS)
    ]
    return [*prompt, *decode]


def times(load: float = LOAD, host: float | None = None, asking: float = 0.0) -> StepTimes:
    by_host = None if host is None else lambda rows: host * 1.0
    return StepTimes(load, lambda rows: EXPERT * rows, lambda tokens: LAYER, by_host, asking=asking)


@pytest.mark.parametrize("eviction", sorted(ONLINE_EVICTION))
@pytest.mark.parametrize("slots", [TOP_K, 11, 30, LAYERS * EXPERTS])
@pytest.mark.parametrize("rows", [1, 3])
def test_loads_are_those_of_the_replay(eviction: str, slots: int, rows: int) -> None:
    """Time changes when experts come, not which: without prefetch the plans are the same."""
    counts = replay(trace(rows=rows), slots, 2, make_eviction(eviction))
    timed = replay_on_clock(trace(rows=rows), slots, 2, make_eviction(eviction), times())
    assert (timed.uses, timed.loads) == (counts.uses, counts.misses)
    assert len(timed.step_seconds) == STEPS


def test_with_all_experts_resident_only_computing_takes_time() -> None:
    timed = replay_on_clock(trace(), LAYERS * EXPERTS, 2, make_eviction("lru"), times())
    assert timed.step_seconds[-1] == pytest.approx(LAYERS * (LAYER + TOP_K * EXPERT))
    assert timed.seconds_per_step > timed.step_seconds[-1], "the first uses were loads"


@pytest.mark.parametrize("slots", [TOP_K, 11, 30])
def test_steps_take_as_long_as_by_a_simpler_clock(slots: int) -> None:
    """On demand: loads one after the other from the decision on, residents meanwhile, the others in their order."""
    routings = trace()
    table, eviction, share = SlotTable(PoolSize(slots, 2)), make_eviction("lru"), layer_share(slots, LAYERS)
    expected, now = [], 0.0
    for routing in routings:
        plan = decide(routing, table, eviction, share, EXACT_SWITCHES).plan
        if routing.phase is Phase.DECODE and not any(load.after for load in plan.loads):
            now = LAYER + EXPERT * sum(not serve.waits for serve in plan.serves)
            for n in range(1, sum(serve.waits for serve in plan.serves) + 1):
                now = max(now, LAYER + n * LOAD) + EXPERT
            expected.append(now)
        carry_out(plan, table, eviction)
    clock = VirtualClock(slots, 2, LAYERS, make_eviction("lru"), times())
    found, before = [], 0.0
    for routing in routings:
        clock.serve(routing)
        now = clock.result.prefill_seconds + sum(clock.result.step_seconds)
        if routing.phase is Phase.DECODE:
            found.append(now - before)
        before = now
    if slots > TOP_K:  # else waves: loads wait for slots, which the simpler clock does not know
        assert found == pytest.approx(expected)
    else:
        assert min(found) >= LAYER + TOP_K * EXPERT


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_reads_its_next_layer_while_this_one_is_computed(ahead: bool) -> None:
    """Two experts a layer, all other than the next layer's, in slots for all of them. Computing takes longer."""
    prompt = [Routing(layer, Phase.PREFILL, EXPERTS, [[0, 1]] * 8) for layer in range(LAYERS)]
    clock, load = VirtualClock(LAYERS * EXPERTS, 4, LAYERS, make_eviction("lru"), times()), 0.5
    clock.change_times(times(load))
    for n, routing in enumerate(prompt, start=1):
        clock.serve(routing, [Prediction(n, [0, 1])] if ahead and n < LAYERS else [])
    computing, first = LAYER + 2 * 8 * EXPERT, load
    waits = 1 if ahead else LAYERS
    assert clock.result.prefill_seconds == pytest.approx(LAYERS * computing + waits * first)
    assert clock.result.prefetches == clock.result.prefetches_used == 0, "they count decode steps only"


def test_a_prompt_reads_no_further_ahead_than_staging_slots_allow() -> None:
    prompt = [Routing(layer, Phase.PREFILL, EXPERTS, [[0, 1, 2]] * 8) for layer in range(2)]
    clock = VirtualClock(LAYERS * EXPERTS, 2, 2, make_eviction("lru"), times(load=0.5))
    clock.serve(prompt[0], [Prediction(1, [0, 1, 2])])
    clock.serve(prompt[1])
    one, computing = 8 * EXPERT, 2 * (LAYER + 3 * 8 * EXPERT)
    assert one > 0.5 and clock.result.prefill_seconds == pytest.approx(computing + 0.5), "only the first was waited for"
    assert clock.result.link_seconds == pytest.approx(6 * 0.5)


def foreseen(
    recall: float,
    asked: Moment = Moment.ROUTED,
    load: float = LOAD,
    asking: float = 0.0,
    depth: int = 1,
    slots: int = 20,
) -> Timed:
    routings = trace()
    predictor = Foresight(routings, recall, asked, depth=depth)
    return replay_on_clock(routings, slots, 6, make_eviction("lru"), times(load, asking=asking), predictor=predictor)


def test_what_is_foreseen_in_time_is_not_waited_for() -> None:
    """Loads of a layer's time together: a perfect predictor hides all but those of a step's first layer."""
    short = LAYER / TOP_K
    perfect = foreseen(1.0, load=short)
    on_demand = replay_on_clock(trace(), 20, 6, make_eviction("lru"), times(short))
    assert perfect.prefetches_used == perfect.prefetches > 100
    assert perfect.loads < on_demand.loads / 2
    first_layers = STEPS * (TOP_K * short)
    least = STEPS * LAYERS * (LAYER + TOP_K * EXPERT)
    assert least <= sum(perfect.step_seconds) <= least + first_layers
    assert sum(perfect.step_seconds) < sum(on_demand.step_seconds)


def test_what_is_foreseen_layers_ahead_is_kept_until_its_layer_comes() -> None:
    """Loads of two layers' time each, and half of what a layer wants is there: begun as soon as the layers before miss
    nothing, more of them are over in time. All are right, so each that is dropped or brought in twice would show."""
    near, far = (foreseen(1.0, load=2 * LAYER, depth=depth, slots=40) for depth in (1, LAYERS - 1))
    assert near.prefetches_used == near.prefetches and far.prefetches_used == far.prefetches
    assert far.seconds_per_step < near.seconds_per_step
    assert far.uses == near.uses


@pytest.mark.parametrize("asked", list(Moment))
def test_wrong_guesses_are_dropped_and_paid_for(asked: Moment) -> None:
    wrong = foreseen(0.0, asked)
    on_demand = replay_on_clock(trace(), 20, 6, make_eviction("lru"), times())
    assert wrong.prefetches > 100
    assert wrong.prefetches_used == 0
    assert wrong.seconds_per_step > on_demand.seconds_per_step, "the link was busy with what nobody wanted"


def test_with_an_alpha_top_score_experts_are_foreseen() -> None:
    """Rank 4's score is 0.4: beyond 1.3 times it are two of the three chosen."""
    coming = Routing(1, Phase.DECODE, 5, [[0, 2, 4]], [[0.9, 0.1, 0.6, 0.4, 0.5]])
    trace = [Routing(0, Phase.DECODE, 5, [[1, 2, 3]], [[0.0] * 5]), coming]
    for alpha, expected in ((0.0, [0, 2, 4]), (0.3, [0, 2]), (1.0, [0])):
        predictor = Foresight(trace)
        predictor.grade_by(Grading(alpha))
        predictor.observe(trace[0])
        (prediction,) = predictor.predict(Sight(0, None))
        assert list(prediction.experts) == expected


@pytest.mark.parametrize(
    ("asking", "before", "beside", "behind"), [(0.5, 6.5, 6.0, 7.0), (2.5, 9.0, 7.5, 7.5), (4.0, 12.0, 10.0, 10.0)]
)
def test_beside_the_experts_asking_hides(asking: float, before: float, beside: float, behind: float) -> None:
    """Two layers of one expert each, of which only the last used stays; every piece of work takes 1, a load 2.

    The router speaks at 1, the first layer's load ends at 3, its expert at 4. Asked before, the computing waits for the
    answer, and the next load is asked for with it; asked beside, it is at 3 or 4, when the computing thread looks, or
    at 4 at the earliest. The last layer asks, too.
    """
    step = [Routing(0, Phase.DECODE, 4, [[0]]), Routing(1, Phase.DECODE, 4, [[1]])]
    for moment, expected in ((Moment.ROUTED, before), (Moment.CONCURRENT, beside), (Moment.FIRST_DONE, behind)):
        trace = step * 5
        took = StepTimes(2.0, lambda rows: 1.0, lambda tokens: 1.0, asking=asking)
        timed = replay_on_clock(trace, 1, 2, make_eviction("lru"), took, predictor=Foresight(trace, asked=moment))
        assert timed.step_seconds[1:] == pytest.approx([expected] * 4), moment
        assert timed.prefetches == timed.prefetches_used == 5


def test_asking_takes_time() -> None:
    """A layer that waits for nothing is not slower: there is no draft to look ahead in, so nobody is asked."""
    assert foreseen(1.0, asking=0.5).seconds_per_step > foreseen(1.0).seconds_per_step
    resident = [
        replay_on_clock(
            trace(), LAYERS * EXPERTS, 6, make_eviction("lru"), times(asking=asking),
            predictor=Foresight(trace(), 1.0, Moment.RESIDENTS_DONE),
        ).step_seconds[-1]
        for asking in (0.0, 9.0)
    ]  # fmt: skip
    assert resident[0] == resident[1]


@pytest.mark.parametrize("host", [0.5, 3.0, 50.0])
def test_the_best_split_is_no_slower_than_either_way_alone(host: float) -> None:
    found = {
        balance: replay_on_clock(trace(), 20, 2, make_eviction("lfu"), times(host=host), balance=balance)
        for balance in ("optimal", "host", None)
    }
    assert found["host"].computed_by_host > 0 == found["host"].loads
    assert found[None].computed_by_host == 0
    if host == 0.5:
        assert found["optimal"].seconds_per_step <= 1.001 * found["host"].seconds_per_step
    if host == 50.0:
        assert found["optimal"].seconds_per_step == pytest.approx(found[None].seconds_per_step)


def priced(budget: QualityBudget | TimeBudget) -> Timed:
    """A long run whose misses are answered within a budget, by substitutes, by nobody, or by loads."""
    table = PriceTable({layer: LayerPrices(1e-3, 3e-2, 2e-2) for layer in range(LAYERS)})
    weighted = [
        routing._replace(weights=[[1 / TOP_K] * TOP_K for _ in routing.top_k_index])
        for seed in range(8)
        for routing in trace(seed)
    ]
    answering = Answering(table, budget)
    return replay_on_clock(weighted, 20, 6, make_eviction("lru"), times(), answering=answering)


def test_the_more_may_be_spent_the_less_time_a_step_takes() -> None:
    """From nothing, where the plans are the exact ones, to so much that nothing is loaded."""
    exact, little, more, all_of_it = (priced(QualityBudget(nats, 100.0)) for nats in (0.0, 2e-3, 8e-3, 1e3))
    same = replay_on_clock([r for seed in range(8) for r in trace(seed)], 20, 6, make_eviction("lru"), times())
    assert exact.step_seconds == same.step_seconds
    assert exact.seconds_per_step > little.seconds_per_step > more.seconds_per_step > all_of_it.seconds_per_step
    assert all_of_it.loads < exact.loads / 20


def test_a_time_that_is_asked_for_is_met() -> None:
    exact = priced(QualityBudget(0.0, 1.0)).seconds_per_step
    least = priced(QualityBudget(1e3, 1.0)).seconds_per_step
    asked = (exact + least) / 2
    steps = priced(TimeBudget(asked, 100.0)).step_seconds
    assert sum(steps[240:]) / len(steps[240:]) == pytest.approx(asked, rel=0.05)


def test_who_knows_names_what_is_worth_a_load() -> None:
    """With an alpha top-score experts alone, with thresholds low copies for what matters little; by hand."""
    scores = [[0.1] * 12 + [0.4, 0.3, 0.11, 0.0]]
    coming = Routing(1, Phase.DECODE, EXPERTS, [[12, 13, 14]], scores, 1, weights=[[0.5, 0.4, 0.1]])
    now = coming._replace(layer=0)

    def named(grading: Grading) -> tuple[list[int], set[int]]:
        predictor = Foresight([now, coming])
        predictor.grade_by(grading)
        predictor.observe(now)
        (answer,) = predictor.predict(Sight(0, None))
        return list(answer.experts), set(answer.low)

    assert named(Grading()) == ([12, 13, 14], set())
    assert named(Grading(0.3)) == ([12, 13], set()), "14 is no better than those that are not chosen"
    assert named(Grading(thresholds=Thresholds(0.4, 1.0))) == ([12, 13, 14], {13, 14})
    assert named(Grading(thresholds=Thresholds(0.4, 0.8))) == ([12, 13], {13})
