"""`plan_layer` and `plan_prefetch` over generated sequences of steps, on tables from roomy down to top-k slots.

Would catch: an expert served twice or not at all, a load that waits for itself (deadlock), a slot overwritten before
its user is computed, a victim that this layer uses.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.load_or_compute import Balance, Costs
from smoe.policy.plan import HOST, LayerPlan, Load, LoadReason
from smoe.policy.plan_prefetch import plan_prefetch, spare_slots
from smoe.policy.plan_progress import carry_out
from smoe.policy.registry import ONLINE_EVICTION, POOLS, eviction_kind, make_eviction, make_eviction_for
from smoe.policy.residency import PoolSize, SlotPool, SlotTable
from smoe.policy.step import PREFILL_KEEP, layer_shares, observation, plan_layer, routes_by_key
from smoe.routing import Phase, Routing
from tests.policy.tables import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Executor,
    assert_loads_can_start,
    assert_plan_serves,
    decode,
    depths,
    predictions,
    routings,
    served,
    used,
)

steps = st.lists(st.tuples(routings(), depths), min_size=1, max_size=25)
cache_sizes = st.integers(TOP_K, LAYERS * EXPERTS + 2)
staging_sizes = st.integers(2, 8)
policies = st.sampled_from(sorted(ONLINE_EVICTION))
ORDERLESS = [name for name in ONLINE_EVICTION if eviction_kind(name).is_orderless]


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
    assert all(load.reason is LoadReason.DEMAND for load in plan.loads)


def spare_of(pool: SlotPool, plan: LayerPlan) -> list[tuple[int, int]]:
    """The staging slots that nobody else has: those that a prompt's plan leaves, in decode all that are free."""
    return plan.spare.get(pool.first, spare_slots(pool))


def assert_prefetch_is_modest(prefetch: list[Load], plan: LayerPlan, executor: Executor) -> None:
    table = executor.table
    assert all(not load.keep and load.victim is None and load.reason is LoadReason.PREFETCH for load in prefetch)
    for pool in map(table.pool, {load.key[0] for load in prefetch}):
        if pool is table.pool(plan.layer):
            assert {(load.slot, load.after) for load in prefetch} <= set(spare_of(pool, plan))
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
    eviction = make_eviction_for(EvictionSettings(name, pools), sizes, dict.fromkeys(range(LAYERS), EXPERTS))
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
@given(steps=steps, cache=cache_sizes, staging=staging_sizes, name=st.sampled_from(["lfu", *ORDERLESS]))
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


def test_padding_alone_plans_nothing() -> None:
    for phase in Phase:
        for rows in ([[EXPERTS] * 2], [[EXPERTS] * 2] * 3):
            plan = plan_layer(Routing(0, phase, EXPERTS, rows), SlotTable(PoolSize(2, 2)), make_eviction("lru"), 1)
            assert not plan.serves and not plan.loads and plan.hits == 0
