"""`plan_prefetch` by hand: what is brought in for later layers, and into whose slots.

Would catch: a look-ahead that takes the last staging slot, a layer further on that goes before the nearest, a
prediction that is asked for and not needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from smoe.expert import EXACT, ExpertKey
from smoe.policy.plan import LayerPlan, Load, LoadReason
from smoe.policy.plan_prefetch import plan_prefetch, prefetch_slots
from smoe.policy.prediction import Prediction
from smoe.policy.registry import make_eviction
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import plan_layer
from tests.policy.tables import (
    Executor,
    decode,
    served,
)


def test_a_right_guess_is_promoted_and_a_wrong_one_forgotten() -> None:
    executor = Executor(SlotTable(PoolSize(4, 3)), make_eviction("lru"))
    plan = plan_layer(decode(0, 0, 1), executor.table, executor.eviction, 9)
    executor.carry_out(plan, plan_prefetch([Prediction(1, [4, 2])], executor.table, plan))
    assert executor.table.staged == {(1, 4, EXACT), (1, 2, EXACT)}
    following = decode(1, 4, 5)
    executor.drop_stale(following)
    plan = served(executor, following)
    assert plan.hits == 1 and [promotion.key for promotion in plan.promotions] == [(1, 4, EXACT)]
    assert (1, 4, EXACT) in set(executor.table.cached())
    assert (1, 2, EXACT) not in executor.table


def test_look_ahead_leaves_one_staging_slot_alone() -> None:
    for staging in (2, 3, 8):
        table = SlotTable(PoolSize(4, staging))
        plan = LayerPlan(0, [], [], [], 0, {})
        assert len(plan_prefetch([Prediction(1, range(9))], table, plan)) == staging - 1


NEAR, NEXT, FAR = Prediction(1, [3, 1]), Prediction(2, [0, 5]), Prediction(3, [4])


def prefetched(table: SlotTable, predictions: list[Prediction]) -> list[ExpertKey]:
    plan = LayerPlan(0, [], [], [], 0, {})
    return [load.key for load in plan_prefetch(predictions, table, plan)]


def table_of(*ready: ExpertKey, staging: int = 4) -> SlotTable:
    table = SlotTable(PoolSize(8, staging))
    for slot, key in enumerate(ready):
        table.begin(Load(key, slot, None, True, LoadReason.DEMAND, 0))
        table.arrive(key)
    return table


def test_what_the_nearest_layer_misses_comes_first_and_alone() -> None:
    assert prefetched(table_of(), [NEAR, NEXT]) == [(1, 3, EXACT), (1, 1, EXACT)], "best first"
    assert prefetched(table_of((1, 3, EXACT)), [NEAR, NEXT]) == [(1, 1, EXACT)], "not the layer after it, too"
    assert prefetched(table_of((2, 0, EXACT), (2, 5, EXACT)), [NEXT]) == []
    assert prefetched(table_of(), []) == []


def test_a_layer_is_looked_at_where_those_before_it_have_everything() -> None:
    near, following = [(1, 3, EXACT), (1, 1, EXACT)], [(2, 0, EXACT), (2, 5, EXACT)]
    assert prefetched(table_of(*near), [NEAR, NEXT, FAR]) == following
    assert prefetched(table_of(*near, *following), [NEAR, NEXT, FAR]) == [(3, 4, EXACT)]
    assert prefetched(table_of(*near, *following), [NEAR, NEXT]) == []
    assert prefetched(table_of(), [Prediction(1, []), NEXT]) == following, "of finished rows nothing is wanted"


def test_what_is_under_way_or_staged_counts_as_there() -> None:
    table = table_of((1, 3, EXACT))
    table.begin(Load((1, 1, EXACT), 8, None, False, LoadReason.PREFETCH, 0))
    assert prefetched(table, [NEAR, NEXT]) == [(2, 0, EXACT), (2, 5, EXACT)]
    table.arrive((1, 1, EXACT))
    assert prefetched(table, [NEAR, NEXT]) == [(2, 0, EXACT), (2, 5, EXACT)]


def test_layers_further_on_are_not_even_asked_for() -> None:
    """A predictor ranks when it is asked: mostly only for the nearest layer."""

    def asked() -> Iterator[Prediction]:
        yield NEAR
        raise AssertionError("the nearest layer misses something")

    plan = LayerPlan(0, [], [], [], 0, {0: [(8, 0), (9, 0)]})
    assert len(plan_prefetch(asked(), table_of(), plan)) == 2


def test_copies_for_later_layers_do_not_take_the_last_staging_slot() -> None:
    """Of four slots two hold such copies: one more may be filled. What this layer has had staged is as good as gone."""
    for layer, room in ((2, 1), (0, 2)):
        table = table_of(staging=4)
        for slot, expert in ((8, 0), (9, 5)):
            table.begin(Load((layer, expert, EXACT), slot, None, False, LoadReason.PREFETCH, 0))
        plan = LayerPlan(0, [], [], [], 0, {})
        assert len(prefetch_slots(table, plan, table.pools[0])) == room
        assert len(plan_prefetch([Prediction(1, range(6))], table, plan)) == room
