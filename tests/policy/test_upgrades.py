"""`plan_upgrades` by hand: what comes in itself while a low copy of it serves.

Would catch: an upgrade of what nobody has served, one that forgets something of more worth or something that the layer
uses, one beside other reads, and so many that the next layer finds no slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.plan import LayerPlan, Load, LoadReason, Serve
from smoe.policy.plan_prefetch import plan_upgrades
from smoe.policy.registry import make_eviction_for
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import plan_layer
from smoe.routing import Phase, Routing
from tests.policy.tables import EXPERTS, LAYERS, Executor, decode

CACHE, LOW_CACHE = 4, 6


def executor_of(*residents: ExpertKey, cache: int = CACHE, staging: int = 2, eviction: str = "lfu") -> Executor:
    """With these copies in cache slots, none of them ever used."""
    sizes = [PoolSize(cache, staging), PoolSize(LOW_CACHE, staging, form=LOW)]
    policy = make_eviction_for(EvictionSettings(eviction), sizes, dict.fromkeys(range(LAYERS), EXPERTS))
    executor = Executor(SlotTable(*sizes), policy)
    for key in residents:
        slot = executor.table.pool_of(key).free_cache[0]
        executor.begin(Load(key, slot, None, True, LoadReason.DEMAND, 0))
        executor.arrive(key)
    return executor


def used(eviction: Eviction, layer: int, *experts: int, times: int = 1) -> None:
    for _ in range(times):
        eviction.observe(decode(layer, *experts))


def upgrades(executor: Executor, routing: Routing, is_idle: bool = True, low_use: str = "asked") -> list[Load]:
    plan = plan_layer(routing, executor.table, executor.eviction, 9, low_use=low_use)
    executor.adopt(plan)
    return plan_upgrades(routing, plan, executor.table, executor.eviction, is_idle)


def keys(loads: Sequence[Load]) -> list[ExpertKey]:
    return [load.key for load in loads]


def asking_low(*experts: int) -> Routing:
    return decode(0, *experts)._replace(low=frozenset(experts))


def test_nothing_where_no_low_copy_serves() -> None:
    executor = executor_of((0, 1, EXACT), (0, 2, EXACT), (0, 1, LOW))
    assert upgrades(executor, asking_low(1, 2)) == []


def test_the_one_that_is_missed_most_comes_alone() -> None:
    executor = executor_of((0, 1, LOW), (0, 2, LOW), (0, 3, LOW))
    used(executor.eviction, 0, 2, times=3)
    used(executor.eviction, 0, 1)
    (load,) = upgrades(executor, asking_low(1, 2, 3))
    assert load == Load((0, 2, EXACT), load.slot, None, True, LoadReason.UPGRADE, 0)
    assert load.slot in executor.table.pool(0).free_cache


def test_it_must_be_worth_more_than_its_victim() -> None:
    residents = [(1, expert, EXACT) for expert in range(CACHE)]
    executor = executor_of(*residents, (0, 2, LOW))
    for expert in range(CACHE):
        used(executor.eviction, 1, expert, times=2 + expert)
    assert upgrades(executor, asking_low(2)) == []
    used(executor.eviction, 0, 2, times=9)
    (load,) = upgrades(executor, asking_low(2))
    assert load.victim == (1, 0, EXACT) and load.slot == executor.table.ready[load.victim]


def test_nothing_while_anything_is_read() -> None:
    executor = executor_of((0, 2, LOW))
    used(executor.eviction, 0, 2, times=9)
    assert upgrades(executor, asking_low(2), is_idle=False) == []
    assert upgrades(executor, decode(0, 2, 4)._replace(low=frozenset({2}))) == [], "4 is being loaded"


def test_no_victim_is_of_use_to_the_layer() -> None:
    """All that is resident serves now: the upgrade waits for another time."""
    executor = executor_of((0, 0, EXACT), (0, 1, EXACT), (0, 2, LOW), cache=2)
    used(executor.eviction, 0, 2, times=9)
    step = Routing(0, Phase.DECODE, EXPERTS, [[0, 2], [1, 2]], low=frozenset({2}))
    assert upgrades(executor, step) == []
    assert len(upgrades(executor, step._replace(top_k_index=[[0, 2]]))) == 1, "1 is of no use now"


def test_what_asks_for_itself_comes_whatever_is_read() -> None:
    executor = executor_of((0, 1, LOW), (0, 2, LOW))
    step = Routing(0, Phase.DECODE, EXPERTS, [[1, 2], [1, 5]])
    assert keys(upgrades(executor, step, is_idle=False, low_use="meanwhile")) == [(0, 1, EXACT), (0, 2, EXACT)]


def test_what_is_under_way_is_not_asked_for_again() -> None:
    executor = executor_of((0, 1, LOW))
    first = upgrades(executor, decode(0, 1), low_use="meanwhile")
    executor.bring(first)
    assert keys(first) == [(0, 1, EXACT)]
    assert upgrades(executor, decode(0, 1), low_use="meanwhile") == []
    plan = plan_layer(decode(0, 1), executor.table, executor.eviction, 9, low_use="meanwhile")
    assert [(serve.key, serve.waits) for serve in plan.serves] == [((0, 1, EXACT), True)], "a load is not made twice"


def test_the_next_layer_finds_a_slot() -> None:
    """Two low copies serve while they are missed themselves; both cache slots for the upgrades would leave none."""
    executor = executor_of((0, 1, LOW), (0, 2, LOW), cache=2)
    executor.bring(upgrades(executor, decode(0, 1, 2), low_use="meanwhile"))
    assert len(executor.table.inflight) == 1
    plan: LayerPlan = plan_layer(decode(1, 3, 4), executor.table, executor.eviction, 9)
    executor.carry_out(plan)
    assert [serve.key for serve in plan.serves] == [(1, 3, EXACT), (1, 4, EXACT)]


def test_upgrades_do_not_pile_up() -> None:
    """A disk that is slower than they are asked for: each costs a resident before it has come."""
    executor = executor_of(*((0, expert, LOW) for expert in range(EXPERTS)), cache=12, staging=3)
    for expert in range(0, EXPERTS, 2):
        executor.bring(upgrades(executor, decode(0, expert, expert + 1), low_use="meanwhile"))
        executor.serve_all(LayerPlan(0, [], [], [], 0, {}))
    assert len(executor.table.inflight) == 3
    assert (
        Serve((0, 5, LOW), (1,), False)
        in plan_layer(decode(0, 4, 5), executor.table, executor.eviction, 9, low_use="meanwhile").serves
    )
