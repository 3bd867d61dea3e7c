"""`plan_layer` and `plan_prefetch` over generated sequences of steps, on tables from roomy down to top-k slots.

Would catch: an expert served twice or not at all, a load that waits for itself (deadlock), a slot overwritten before
its user is computed, a victim that this layer uses, a prefill that throws away what decoding keeps, a look-ahead that
takes the last staging slot.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe.errors import BudgetError
from smoe.expert import EXACT, ExpertKey
from smoe.policy.balance import Balance, Costs
from smoe.policy.plan import HOST, LayerPlan, Load, Reason
from smoe.policy.plan_progress import carry_out
from smoe.policy.planner import (
    LAST_TOKENS,
    PREFILL_KEEP,
    layer_shares,
    observation,
    plan_layer,
    plan_prefetch,
    prefetch_slots,
    routes_by_key,
)
from smoe.policy.prediction import Prediction
from smoe.policy.registry import ONLINE_EVICTION, ORDERLESS_EVICTION, POOLS, make_eviction, make_eviction_for
from smoe.policy.residency import PoolSize, SlotTable
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
    used,
)

steps = st.lists(st.tuples(routings(), depths), min_size=1, max_size=25)
cache_sizes = st.integers(TOP_K, LAYERS * EXPERTS + 2)
staging_sizes = st.integers(2, 8)
policies = st.sampled_from(sorted(ONLINE_EVICTION))


def assert_plan_is_sound(plan: LayerPlan, routing: Routing, executor: Executor) -> None:
    """What must hold before anything is carried out."""
    table = executor.table
    assert_plan_serves(plan, routing)
    assert_loads_can_start(plan)
    assert plan.hits == len(plan.serves) - len(plan.loads) - sum(serve.unit == HOST for serve in plan.serves)
    wanted, before = set(used(routing)), set(table.cached())
    early_victims = {load.victim for load in plan.loads if load.victim is not None and load.after == 0}
    early_victims |= {p.victim for p in plan.promotions if p.victim is not None and not p.after}
    assert not early_victims & wanted, "a resident that this layer uses is evicted before it is computed"
    assert early_victims <= before
    if routing.phase is Phase.PREFILL:
        assert not early_victims and all(load.victim is None for load in plan.loads), "before they are served"
    assert all(load.reason is Reason.DEMAND for load in plan.loads)


def assert_prefetch_is_modest(prefetch: list[Load], plan: LayerPlan, executor: Executor) -> None:
    table = executor.table
    assert all(not load.keep and load.victim is None and load.reason is Reason.PREFETCH for load in prefetch)
    for pool in map(table.pool, {load.key[0] for load in prefetch}):
        if pool is table.pool(plan.layer):
            assert {(load.slot, load.after) for load in prefetch} <= set(plan.spare)
        assert len({load.slot for load in prefetch}) == len(prefetch) < pool.staging_slots
    copies = [load.key for load in prefetch]
    assert len(set(copies)) == len(copies)
    assert not set(copies) & (table.ready.keys() | table.inflight.keys())


def assert_prefill_kept_the_best(before: set[ExpertKey], routing: Routing, executor: Executor) -> None:
    """No layer has fewer residents than before, and who left is used less by the last tokens than who came."""
    after = set(executor.table.cached())
    lost, gained = before - after, after - before
    assert {key[0] for key in lost | gained} <= {routing.layer}
    assert len(lost) <= len(gained)
    heard = observation(routing).top_k_index
    uses = {key: sum(key[1] in row for row in heard) for key in lost | gained}
    assert all(any(uses[new] > uses[old] for new in gained) for old in lost)


def run(
    steps: list[tuple[Routing, list[list[int]]]],
    cache: int,
    staging: int,
    name: str,
    looks_ahead: bool,
    keep: str = "last-uses",
    balance: Balance | None = None,
) -> Executor:
    table = SlotTable(PoolSize(cache, staging))
    return run_on(Executor(table, make_eviction(name)), steps, looks_ahead, keep, balance)


def run_on(
    executor: Executor,
    steps: list[tuple[Routing, list[list[int]]]],
    looks_ahead: bool,
    keep: str = "last-uses",
    balance: Balance | None = None,
) -> Executor:
    shares = layer_shares(executor.table, range(LAYERS))
    for routing, guessed in steps:
        executor.drop_stale(routing)
        executor.eviction.observe(observation(routing))
        residents = set(executor.table.cached())
        plan = plan_layer(routing, executor.table, executor.eviction, shares[routing.layer], balance, keep)
        assert_plan_is_sound(plan, routing, executor)
        executor.promote([promotion for promotion in plan.promotions if not promotion.after])
        promoted = plan._replace(promotions=[promotion for promotion in plan.promotions if promotion.after])
        prefetch: list[Load] = []
        if looks_ahead:
            prefetch = plan_prefetch(predictions(routing.layer, guessed), executor.table, plan)
            assert_prefetch_is_modest(prefetch, plan, executor)
        loaded = len(executor.loaded)
        executor.carry_out(promoted, prefetch)
        if routing.phase is Phase.PREFILL:
            if keep == "last-uses":
                assert_prefill_kept_the_best(residents, routing, executor)
            else:
                assert len(residents) <= len(set(executor.table.cached())), "prefill lost a cache slot"
            assert len(set(executor.loaded[loaded:])) == len(executor.loaded[loaded:]), "prefill reads an expert once"
        assert set(executor.table.cached()) == executor.eviction.residents()
        free = [len(pool.free_staging) for pool in executor.table.pools]
        assert min(free) >= 1, "no staging slot is left for the next layer"
    return executor


@settings(max_examples=150, deadline=None)
@given(steps=steps, cache=cache_sizes, staging=staging_sizes, name=policies)
def test_any_sequence_of_steps(
    steps: list[tuple[Routing, list[list[int]]]], cache: int, staging: int, name: str
) -> None:
    run(steps, cache, staging, name, looks_ahead=False)


@settings(max_examples=200, deadline=None)
@given(steps=steps, cache=cache_sizes, staging=staging_sizes, name=policies)
def test_any_sequence_with_look_ahead(
    steps: list[tuple[Routing, list[list[int]]]], cache: int, staging: int, name: str
) -> None:
    """Right and wrong guesses before decode and prefill alike: never a deadlock, never a wrong slot."""
    run(steps, cache, staging, name, looks_ahead=True)


@settings(max_examples=150, deadline=None)
@given(
    steps=steps,
    cache=st.tuples(cache_sizes, cache_sizes),
    staging=st.tuples(staging_sizes, staging_sizes),
    name=policies,
    pools=st.sampled_from(POOLS),
    keep=st.sampled_from(PREFILL_KEEP),
)
def test_any_sequence_over_slots_of_two_sizes(
    steps: list[tuple[Routing, list[int]]],
    cache: tuple[int, int],
    staging: tuple[int, int],
    name: str,
    pools: str,
    keep: str,
) -> None:
    """Would catch an expert that is given a slot of another size, as a victim's, a prefetch's or a promotion's."""
    sizes = [PoolSize(cache[0], staging[0], (1,)), PoolSize(cache[1], staging[1], (0, 2))]
    eviction = make_eviction_for(name, pools, sizes, dict.fromkeys(range(LAYERS), EXPERTS))
    run_on(Executor(SlotTable(*sizes), eviction), steps, True, keep)


@settings(max_examples=100, deadline=None)
@given(
    steps=steps, cache=cache_sizes, staging=staging_sizes, name=policies, looks_ahead=st.booleans(), host=st.booleans()
)
def test_any_sequence_kept_by_the_eviction_policy(
    steps: list[tuple[Routing, list[list[int]]]], cache: int, staging: int, name: str, looks_ahead: bool, host: bool
) -> None:
    """And with a CPU beside the device that takes as long as the link."""
    balance = Balance("optimal", "score", Costs(1.0, 1.0, 0.0, 0.5)) if host else None
    run(steps, cache, staging, name, looks_ahead, "eviction", balance)


@settings(max_examples=60, deadline=None)
@given(steps=steps, cache=cache_sizes, staging=staging_sizes, name=st.sampled_from(["lfu", *ORDERLESS_EVICTION]))
def test_the_simulator_s_shortcut_is_the_same(
    steps: list[tuple[Routing, list[list[int]]]], cache: int, staging: int, name: str
) -> None:
    """`carry_out` against the event by event executor: same residents, same slots, after every step.

    Not of LRU, where what nobody has used since ranks by when it arrived: at once there, as late as can be here.
    """
    executor = Executor(SlotTable(PoolSize(cache, staging)), make_eviction(name))
    table = SlotTable(PoolSize(cache, staging))
    eviction = make_eviction(name)
    for routing, _ in steps:
        plans = []
        for residency, policy in ((executor.table, executor.eviction), (table, eviction)):
            policy.observe(observation(routing))
            plans.append(plan_layer(routing, residency, policy, max(1, cache // LAYERS)))
        assert plans[0] == plans[1]
        executor.carry_out(plans[0])
        carry_out(plans[1], table, eviction)
        table.check()
        assert (table.ready, table.pools[0].free_cache, table.pools[0].free_staging) == (
            executor.table.ready,
            executor.table.pools[0].free_cache,
            executor.table.pools[0].free_staging,
        )
        assert eviction.victims(99, ()) == executor.eviction.victims(99, ())


@given(routing=routings())
def test_routes_against_a_double_loop(routing: Routing) -> None:
    found = routes_by_key(routing)
    assert list(found) == used(routing)
    expected = {
        key: tuple(
            token * TOP_K + choice
            for choice in range(TOP_K)
            for token, row in enumerate(routing.top_k_index)
            if row[choice] == key[1]
        )
        for key in used(routing)
    }
    assert found == expected


def decode(layer: int, *experts: int) -> Routing:
    return Routing(layer, Phase.DECODE, EXPERTS, [list(experts)])


def served(executor: Executor, routing: Routing, share: int = 9) -> LayerPlan:
    executor.eviction.observe(observation(routing))
    plan = plan_layer(routing, executor.table, executor.eviction, share)
    executor.carry_out(plan)
    return plan


def test_decode_computes_what_is_here_before_it_waits() -> None:
    """Resident, then under way, then missing, whatever their numbers: computing hides reading."""
    executor = Executor(SlotTable(PoolSize(6, 2)), make_eviction("lru"))
    served(executor, decode(0, 3, 5))
    routing = Routing(0, Phase.DECODE, EXPERTS, [[0, 5], [3, 1]])
    plan = plan_layer(routing, executor.table, executor.eviction, 9)
    assert [serve.key[1] for serve in plan.serves] == [3, 5, 0, 1]
    assert [serve.waits for serve in plan.serves] == [False, False, True, True]
    assert plan.hits == 2


def test_waves_reuse_the_slots_of_experts_computed_before() -> None:
    """Six experts through two slots: each load waits for just one more serve."""
    executor = Executor(SlotTable(PoolSize(2, 2)), make_eviction("lru"))
    plan = served(executor, Routing(0, Phase.DECODE, EXPERTS, [[0, 1], [2, 3], [4, 5]]))
    assert [load.after for load in plan.loads] == [0, 0, 1, 2, 3, 4]
    assert [load.slot for load in plan.loads] == [0, 1, 0, 1, 0, 1]
    assert sorted(executor.table.cached()) == [(0, 4, EXACT), (0, 5, EXACT)]


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
        plan = LayerPlan(0, [], [], [], 0, [(4 + n, 0) for n in range(staging)])
        assert len(plan_prefetch([Prediction(1, range(9))], table, plan)) == staging - 1


NEAR, NEXT, FAR = Prediction(1, [3, 1]), Prediction(2, [0, 5]), Prediction(3, [4])


def prefetched(table: SlotTable, predictions: list[Prediction]) -> list[ExpertKey]:
    plan = LayerPlan(0, [], [], [], 0, [(slot, 0) for slot in table.pools[0].free_staging])
    return [load.key for load in plan_prefetch(predictions, table, plan)]


def table_of(*ready: ExpertKey, staging: int = 4) -> SlotTable:
    table = SlotTable(PoolSize(8, staging))
    for slot, key in enumerate(ready):
        table.begin(Load(key, slot, None, True, Reason.DEMAND, 0))
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
    table.begin(Load((1, 1, EXACT), 8, None, False, Reason.PREFETCH, 0))
    assert prefetched(table, [NEAR, NEXT]) == [(2, 0, EXACT), (2, 5, EXACT)]
    table.arrive((1, 1, EXACT))
    assert prefetched(table, [NEAR, NEXT]) == [(2, 0, EXACT), (2, 5, EXACT)]


def test_layers_further_on_are_not_even_asked_for() -> None:
    """A predictor ranks when it is asked: mostly only for the nearest layer."""

    def asked() -> Iterator[Prediction]:
        yield NEAR
        raise AssertionError("the nearest layer misses something")

    plan = LayerPlan(0, [], [], [], 0, [(8, 0), (9, 0)])
    assert len(plan_prefetch(asked(), table_of(), plan)) == 2


def test_copies_for_later_layers_do_not_take_the_last_staging_slot() -> None:
    """Of four slots two hold such copies: one more may be filled. What this layer has had staged is as good as gone."""
    for layer, room in ((2, 1), (0, 2)):
        table = table_of(staging=4)
        for slot, expert in ((8, 0), (9, 5)):
            table.begin(Load((layer, expert, EXACT), slot, None, False, Reason.PREFETCH, 0))
        plan = LayerPlan(0, [], [], [], 0, [(slot, 0) for slot in table.pools[0].free_staging])
        assert len(prefetch_slots(table, plan, table.pools[0])) == room
        assert len(plan_prefetch([Prediction(1, range(6))], table, plan)) == room


def test_prefill_keeps_what_the_last_tokens_use() -> None:
    """A layer's share of two: of six experts those stay that the end of the prompt uses most."""
    rows = [[0, 1]] * LAST_TOKENS + [[2, 3]] * (LAST_TOKENS - 2) + [[4, 2]] * 2
    executor = Executor(SlotTable(PoolSize(6, 2)), make_eviction("lru"))
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, rows), share=2)
    assert sorted(executor.table.cached()) == [(0, 2, EXACT), (0, 3, EXACT)]


def test_a_second_prompt_takes_the_places_of_the_first() -> None:
    """The layer is full: what the new prompt ends with stays instead of what it does not use, or no longer."""
    executor = Executor(SlotTable(PoolSize(6, 2)), make_eviction("lru"))
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[0, 1]] * 4), share=2)
    served(executor, Routing(1, Phase.PREFILL, EXPERTS, [[0, 1]] * 4), share=2)
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[0, 1]] * 9 + [[4, 5]] * LAST_TOKENS), share=2)
    assert sorted(executor.table.cached()) == [(0, 4, EXACT), (0, 5, EXACT), (1, 0, EXACT), (1, 1, EXACT)]


def test_who_has_not_served_yet_does_not_give_way() -> None:
    """Experts are taken in ascending order: 1 is computed after 0 has come and gone."""
    executor = Executor(SlotTable(PoolSize(6, 2)), make_eviction("lru"))
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[1, 1]] * 4), share=1)
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[1, 1]] + [[0, 0]] * LAST_TOKENS), share=1)
    assert list(executor.table.cached()) == [(0, 1, EXACT)]
    served(executor, Routing(0, Phase.PREFILL, EXPERTS, [[0, 0]] * LAST_TOKENS), share=1)
    assert list(executor.table.cached()) == [(0, 0, EXACT)], "not used at all: it need not have served"


def test_the_eviction_policy_may_decide_what_stays() -> None:
    """Expert 0 has been used by more steps than the resident of another layer, so it takes that one's slot."""
    eviction = make_eviction("lfu")
    executor = Executor(SlotTable(PoolSize(2, 2)), eviction)
    served(executor, decode(1, 2, 3))
    for _ in range(3):
        eviction.observe(decode(0, 0, 5))
    prompt = Routing(0, Phase.PREFILL, EXPERTS, [[0, 4]] * 4)
    eviction.observe(observation(prompt))
    plan = plan_layer(prompt, executor.table, eviction, 1, None, "eviction")
    executor.carry_out(plan)
    assert sorted(executor.table.cached()) == [(0, 0, EXACT), (1, 3, EXACT)]


def test_the_cpu_takes_a_prompts_experts_of_few_tokens() -> None:
    """Loads take 4 each; three experts for 9, 2 and 1 tokens that cost the CPU 1 a token, or 1.5 at least."""
    rows = [[0, 0]] * 9 + [[1, 1]] * 2 + [[2, 2]]
    costs = Costs(load=4.0, host=1.5, token=0.5)
    table, eviction = SlotTable(PoolSize(2, 2)), make_eviction("lru")
    table.pools[0].free_cache.clear()  # nothing stays
    plan = plan_layer(Routing(0, Phase.PREFILL, EXPERTS, rows), table, eviction, 1, Balance("host", "score", costs))
    assert [serve.key[1] for serve in plan.serves] == [0, 1, 2], "served in ascending order all the same"
    assert [serve.key[1] for serve in plan.serves if serve.unit == HOST] == [1, 2]
    assert [load.key[1] for load in plan.loads] == [0] and plan.hits == 0


def test_what_stays_is_loaded_though_the_cpu_is_faster() -> None:
    executor = Executor(SlotTable(PoolSize(1, 2)), make_eviction("lru"))
    costs = Costs(load=9.0, host=1.0, token=0.1)
    prompt = Routing(0, Phase.PREFILL, EXPERTS, [[0, 1], [0, 2]])
    plan = plan_layer(prompt, executor.table, executor.eviction, 1, Balance("optimal", "score", costs))
    assert [load.key[1] for load in plan.loads] == [0]
    executor.carry_out(plan)
    assert list(executor.table.cached()) == [(0, 0, EXACT)]


def test_an_eviction_policy_learns_from_the_end_of_a_prompt_and_from_every_decode_step() -> None:
    rows = [[0, 1]] * 5 + [[2, 3]] * LAST_TOKENS
    assert observation(Routing(0, Phase.PREFILL, EXPERTS, rows)).top_k_index == [[2, 3]] * LAST_TOKENS
    step = Routing(0, Phase.DECODE, EXPERTS, rows)
    assert observation(step) is step


def test_each_sequence_of_a_batch_has_its_own_end() -> None:
    """Three prompts in one step: what stays, and what policies hear, is the end of each, not that of the last."""
    early, late = [[0, 1]] * 8, [[2, 3]] * LAST_TOKENS
    rows = [*early, *late, *early, *([[4, 3]] * LAST_TOKENS), *early, *([[5, 3]] * LAST_TOKENS)]
    routing = Routing(0, Phase.PREFILL, EXPERTS, rows, None, sequences=3)
    heard = observation(routing).top_k_index
    assert heard == [[2, 3], [4, 3], [5, 3]] * (LAST_TOKENS // 3), "token by token, as a batch decodes"
    executor = Executor(SlotTable(PoolSize(12, 2)), make_eviction("lru"))
    served(executor, routing, share=4)
    assert sorted(key[1] for key in executor.table.cached()) == [2, 3, 4, 5]


def test_padding_is_no_last_token() -> None:
    """On the left (prompts of different lengths), on the right (a caller's mask), and a sequence of nothing else."""
    none = [EXPERTS] * 2
    rows = [[none, [0, 1], [0, 2]], [[1, 2], [1, 3], none], [none, none, none]]
    routing = Routing(0, Phase.PREFILL, EXPERTS, [row for part in rows for row in part], None, sequences=3)
    assert observation(routing).top_k_index == [[0, 1], [1, 2], [0, 2], [1, 3]]


def test_padding_alone_plans_nothing() -> None:
    for phase in Phase:
        for rows in ([[EXPERTS] * 2], [[EXPERTS] * 2] * 3):
            plan = plan_layer(Routing(0, phase, EXPERTS, rows), SlotTable(PoolSize(2, 2)), make_eviction("lru"), 1)
            assert not plan.serves and not plan.loads and plan.hits == 0


def test_prefill_without_staging_is_a_budget_error() -> None:
    executor = Executor(SlotTable(PoolSize(2, 0)), make_eviction("lru"))
    served(executor, decode(1, 0, 1))
    with pytest.raises(BudgetError, match="staging"):
        plan_layer(Routing(0, Phase.PREFILL, EXPERTS, [[0, 1]]), executor.table, executor.eviction, 1)
