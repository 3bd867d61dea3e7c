"""Plans over slots of two formats, in generated sequences of steps with routing weights and thresholds.

Would catch: a route that is served twice, or left out where nobody asked for it; a low copy that serves although the
expert itself is here; a slot of one format that holds another; a load that never starts; an upgrade that takes what the
running layer uses, or so many slots that the next layer has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.importance import Thresholds
from smoe.policy.plan import Load, LoadReason
from smoe.policy.plan_prefetch import plan_prefetch, plan_upgrades
from smoe.policy.registry import ONLINE_EVICTION, make_eviction_for
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import LOW_USE, PREFILL_KEEP, Decision, Switches, decide, layer_shares
from smoe.routing import Phase, Routing
from tests.policy.tables import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Executor,
    assert_loads_can_start,
    assert_plan_serves,
    depths,
    predictions,
    routings,
)

BOUNDS = (0.0, 0.5, 0.6, 0.75, 0.9, 1.0)
"""Thresholds; the second of two weights has an unimportance of 0.5 to 1."""


class Step(NamedTuple):
    routing: Routing
    guessed: list[list[int]]
    guessed_low: frozenset[int]
    is_quiet: bool
    """All that is under way has arrived before it."""


@st.composite
def steps(draw: st.DrawFn) -> Step:
    routing = draw(routings())
    first = draw(st.lists(st.sampled_from(BOUNDS), min_size=len(routing.top_k_index), max_size=len(BOUNDS) + 8))
    weights = [[weight, 1 - weight] for weight in first[: len(routing.top_k_index)]]
    low = draw(st.frozensets(st.integers(0, EXPERTS - 1)))
    return Step(routing._replace(weights=weights), draw(depths), low, draw(st.booleans()))


@st.composite
def sizes(draw: st.DrawFn) -> list[PoolSize]:
    """Slots of both formats, from the fewest that are ever made to all; one size, or one of two for each."""
    most = LAYERS * EXPERTS + 2

    def pool(form: int, *layers: int) -> PoolSize:
        return PoolSize(draw(st.integers(TOP_K, most)), draw(st.integers(2, 8)), layers, form)

    if draw(st.booleans()):
        return [pool(EXACT), pool(LOW)]
    return [pool(EXACT, 1), pool(EXACT, 0, 2), pool(LOW, 0, 1, 2)]


@st.composite
def switches(draw: st.DrawFn) -> Switches:
    low, skip = sorted((draw(st.sampled_from(BOUNDS)), draw(st.sampled_from(BOUNDS))))
    use, keep = draw(st.sampled_from(LOW_USE)), draw(st.sampled_from(PREFILL_KEEP))
    return Switches(prefill_keep=keep, thresholds=Thresholds(low, skip), low_use=use)


def beyond(routing: Routing, threshold: float) -> set[int]:
    """Experts that are less important than that to every row that chose them. Of two choices the one of less weight,
    the second if they are equal, is as unimportant as the other weighs."""
    assert routing.weights is not None
    wanted, enough = set(), set()
    for (a, b), (of_a, of_b) in zip(routing.top_k_index, routing.weights, strict=True):
        if a == EXPERTS:
            continue
        wanted |= {a, b}
        enough.add(a if of_a >= of_b else b)
        if max(of_a, of_b) <= threshold + 1e-6:
            enough |= {a, b}
    return wanted - enough


def expected_copies(routing: Routing, table: SlotTable, switches: Switches) -> set[ExpertKey]:
    """Who serves, said expert by expert, by what is here before the step."""
    here, thresholds = {*table.ready, *table.inflight}, switches.thresholds
    low, skip = beyond(routing, thresholds.low), beyond(routing, thresholds.skip)
    copies = set()
    for expert in {e for row in routing.top_k_index for e in row if e != EXPERTS}:
        own, lower = (routing.layer, expert, EXACT), (routing.layer, expert, LOW)
        if expert in skip and own not in here and lower not in here:
            continue
        if switches.low_use == "only":
            copies.add(lower)
        elif own in here:
            copies.add(own)
        elif expert in low or (
            switches.low_use == "meanwhile"
            and routing.phase is Phase.DECODE
            and lower in table.ready
            and lower not in table.staged
        ):
            copies.add(lower)
        else:
            copies.add(own)
    return copies


def assert_each_format_in_its_slots(executor: Executor, uses_both: bool) -> None:
    """`uses_both`: whether experts serve themselves, too; else what is prefetched of them waits to be dropped."""
    for slot, key in executor.in_slot.items():
        pool = executor.table.pool_of(key)
        assert pool.first <= slot < pool.end, (slot, key)
    assert set(executor.table.cached()) == executor.eviction.residents()
    for pool in executor.table.pools:
        held = [key for key in executor.table.cached() if executor.table.pool_of(key) is pool]
        assert len(held) <= pool.cache_slots
        assert pool.free_staging or not uses_both, "no staging slot is left for the next layer"


def assert_decision_is_sound(decision: Decision, asked: Routing, copies: set[ExpertKey], table: SlotTable) -> None:
    plan = decision.plan
    assert_plan_serves(plan, asked, copies)
    assert_loads_can_start(plan)
    used = {expert for row in asked.top_k_index for expert in row if expert != EXPERTS}
    assert decision.skipped == len(used) - len(copies)
    missing = {key for key in copies if key not in table.ready and key not in table.inflight}
    assert {load.key for load in plan.loads} == missing and plan.hits == len(copies) - len(missing)
    for load in plan.loads:
        assert load.reason is LoadReason.DEMAND
        assert load.victim is None or load.victim[2] == load.key[2]
        assert load.after or load.victim not in copies, "a resident that this layer uses is evicted before it serves"
    assert all(p.victim is None or p.victim[2] == p.key[2] for p in plan.promotions)


def assert_prefetch_is_modest(prefetch: Sequence[Load], guessed_low: frozenset[int], table: SlotTable) -> None:
    here = {*table.ready, *table.inflight}
    for load in prefetch:
        layer, expert, form = load.key
        assert load.key not in here and load.reason is LoadReason.PREFETCH and not load.keep
        assert form == (LOW if expert in guessed_low else EXACT)
        assert (layer, expert, EXACT) not in here, "a low copy of an expert that is here"
    for pool in table.pools:
        slots = [load.slot for load in prefetch if table.pool_of(load.key) is pool]
        assert len(set(slots)) == len(slots) < pool.staging_slots


def assert_upgrades_are_modest(upgrades: Sequence[Load], decision: Decision, is_idle: bool, executor: Executor) -> None:
    table, plan = executor.table, decision.plan
    served = {serve.key for serve in plan.serves}
    for load in upgrades:
        layer, expert, form = load.key
        assert form == EXACT and (layer, expert, LOW) in served
        assert load.key not in {*table.ready, *table.inflight}
        assert load.keep and load.reason is LoadReason.UPGRADE and load.after == 0
        assert load.victim not in served
        assert load.victim is None or table.ready[load.victim] == load.slot
        if expert in decision.routing.low:
            worth = executor.eviction.worth
            assert is_idle and not plan.loads and len(upgrades) == 1
            assert load.victim is None or worth(load.victim) < worth(load.key)
    assert len({load.slot for load in upgrades}) == len(upgrades)


def run(
    all_steps: Sequence[Step], pools: Sequence[PoolSize], name: str, switches: Switches, leaves_free: bool = False
) -> Executor:
    """As the engine serves them; what nobody waits for arrives when a step says so, or when it is waited for.
    `leaves_free`: prompts leave free slots free."""
    eviction = make_eviction_for(EvictionSettings(name), pools, dict.fromkeys(range(LAYERS), EXPERTS))
    executor = Executor(SlotTable(*pools), eviction)
    table, shares = executor.table, layer_shares(executor.table, range(LAYERS))
    for routing, guessed, guessed_low, is_quiet in all_steps:
        if is_quiet:
            for key in list(table.inflight):
                executor.arrive(key)
        copies: list[set[ExpertKey]] = []

        def drop_stale(served: Routing, asked: Routing = routing, found: list[set[ExpertKey]] = copies) -> None:
            executor.drop_stale(served)
            found.append(expected_copies(asked, table, switches))

        if not table.staged:
            copies.append(expected_copies(routing, table, switches))
        share = 0 if leaves_free else shares[routing.layer]
        decision = decide(routing, table, eviction, share, switches, None, drop_stale)
        assert_decision_is_sound(decision, routing, copies[0], table)
        if leaves_free and routing.phase is Phase.PREFILL:
            assert not any(load.keep for load in decision.plan.loads)
            assert all(promotion.victim is not None for promotion in decision.plan.promotions)
        executor.adopt(decision.plan)
        named = [each._replace(low=guessed_low) for each in predictions(routing.layer, guessed)]
        prefetch = plan_prefetch(named, table, decision.plan)
        assert_prefetch_is_modest(prefetch, guessed_low, table)
        executor.bring(prefetch)
        if routing.phase is Phase.DECODE and switches.low_use != "only":
            is_idle = not table.inflight
            upgrades = plan_upgrades(decision.routing, decision.plan, table, eviction, is_idle)
            assert_upgrades_are_modest(upgrades, decision, is_idle, executor)
            executor.bring(upgrades)
        executor.serve_all(decision.plan)
        assert_each_format_in_its_slots(executor, switches.low_use != "only")
    return executor


@settings(max_examples=200, deadline=None)
@given(
    all_steps=st.lists(steps(), min_size=1, max_size=20),
    pools=sizes(),
    name=st.sampled_from(sorted(ONLINE_EVICTION)),
    switches=switches(),
    leaves_free=st.booleans(),
)
def test_any_sequence(
    all_steps: list[Step], pools: list[PoolSize], name: str, switches: Switches, leaves_free: bool
) -> None:
    run(all_steps, pools, name, switches, leaves_free)
