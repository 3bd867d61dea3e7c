"""Plans whose loads end whenever they like, well or badly: table and eviction policy always know the same residents.

Would catch: a resident that the policy cannot evict, one that it evicts twice, a load that begins before its slot is
free, an interrupt that leaves a slot without an owner.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.lru import LRU
from smoe.policy.eviction.pools import SizePools
from smoe.policy.plan import LayerPlan, Load, LoadReason
from smoe.policy.plan_prefetch import plan_prefetch
from smoe.policy.plan_progress import Progress
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import plan_layer
from smoe.routing import Phase, Routing
from tests.policy.tables import EXPERTS, LAYERS, TOP_K, decode, depths, predictions, routings

steps = st.lists(st.tuples(routings(), depths), min_size=1, max_size=12)


class OnceEach(LRU):
    """Hears of every resident once, when it has come, and once when it goes."""

    def insert(self, key: ExpertKey) -> None:
        assert key not in set(self.victims(LAYERS * EXPERTS + 9, ())), f"{key} comes twice"
        super().insert(key)

    def remove(self, key: ExpertKey) -> None:
        assert key in set(self.victims(LAYERS * EXPERTS + 9, ())), f"{key} goes and never came"
        super().remove(key)


class Loads:
    """Under way until somebody says how they ended."""

    def __init__(self) -> None:
        self.running: list[ExpertKey] = []
        self.begun: list[Load] = []

    def begin(self, load: Load) -> None:
        self.running.append(load.key)
        self.begun.append(load)


def known(progress: Progress) -> set[ExpertKey]:
    return set(progress.eviction.victims(LAYERS * EXPERTS + 9, ()))


def assert_agreement(progress: Progress) -> None:
    progress.table.check()
    assert known(progress) == set(progress.table.cached())


def drop_stale(progress: Progress, loads: Loads, routing: Routing) -> None:
    """As the engine does before a plan is made: what was prefetched and is not wanted leaves."""
    for key in progress.look_through(routing)[1]:
        if key in loads.running:
            loads.running.remove(key)
            progress.fail(key)
        else:
            progress.table.release(key)


def serve_all(
    progress: Progress, loads: Loads, routing: Routing, guessed: list[list[int]], data: st.DataObject
) -> None:
    """One layer, every load ending at a time of its own but before it is computed; prefetches may outlive the layer."""
    table = progress.table
    drop_stale(progress, loads, routing)
    plan = plan_layer(routing, table, progress.eviction, 2)
    loads.begun = []
    progress.adopt(plan)
    if routing.phase is Phase.DECODE:
        progress.prefetch(plan_prefetch(predictions(routing.layer, guessed), table, plan))
    for computed, serve in enumerate(plan.serves, start=1):
        for key in data.draw(st.lists(st.sampled_from(loads.running), unique=True)) if loads.running else ():
            loads.running.remove(key)
            progress.arrive(key)
        if serve.key in loads.running:
            loads.running.remove(serve.key)
            progress.arrive(serve.key)
        progress.served(serve, computed)
        assert all(load.after <= computed for load in loads.begun), "a slot was taken while it was in use"
    assert [load for load in loads.begun if load in plan.loads] == plan.loads


@settings(max_examples=60)
@given(steps, st.integers(TOP_K, LAYERS * EXPERTS), st.integers(2, 6), st.data())
def test_table_and_policy_agree_after_every_layer(steps, cache_slots, staging_slots, data) -> None:
    loads = Loads()
    progress = Progress(SlotTable(PoolSize(cache_slots, staging_slots)), OnceEach(), loads.begin)
    for routing, guessed in steps:
        serve_all(progress, loads, routing, guessed, data)
        assert_agreement(progress)


@settings(max_examples=60)
@given(steps, routings(), st.integers(TOP_K, 8), st.data())
def test_an_interrupt_anywhere_is_undone(steps, last, cache_slots, data) -> None:
    loads = Loads()
    progress = Progress(SlotTable(PoolSize(cache_slots, 3)), OnceEach(), loads.begin)
    for routing, guessed in steps:
        serve_all(progress, loads, routing, guessed, data)
    drop_stale(progress, loads, last)
    plan = plan_layer(last, progress.table, progress.eviction, 2)
    progress.adopt(plan)
    for computed, serve in enumerate(plan.serves[: data.draw(st.integers(0, len(plan.serves)))], start=1):
        if serve.key in progress.table.inflight:
            progress.arrive(serve.key)
        progress.served(serve, computed)
    progress.recover()
    assert not progress.table.inflight and not progress.table.staged
    assert_agreement(progress)
    progress.reset(OnceEach())
    assert not known(progress) and not progress.table.ready
    progress.table.check()


def begun(*keys: ExpertKey) -> Progress:
    """Layer 0 of a decode step has run and prefetched these."""
    progress = Progress(SlotTable(PoolSize(4, 6)), LRU(), lambda load: None)
    progress.adopt(LayerPlan(0, [], [], [], 0, {}))
    progress.prefetch([Load(key, 4 + n, None, False, LoadReason.PREFETCH, 0) for n, key in enumerate(keys)])
    return progress


NEXT, WRONG, LATER, LAST = (1, 3, EXACT), (1, 4, EXACT), (2, 3, EXACT), (5, 0, EXACT)


def test_what_is_for_later_layers_stays_until_they_come() -> None:
    """Ready or under way alike; a guess for this layer that is not wanted goes."""
    progress = begun(NEXT, WRONG, LATER, LAST)
    progress.arrive(LATER)
    wanted, stale = progress.look_through(decode(1, 3, 0))
    assert (wanted, stale) == ([NEXT], [WRONG])
    progress.adopt(LayerPlan(1, [], [], [], 0, {}))
    wanted, stale = progress.look_through(decode(2, 3, 0))
    assert wanted == [LATER] and set(stale) == {NEXT, WRONG}, "what was for a layer before has missed it"
    progress.adopt(LayerPlan(2, [], [], [], 0, {}))
    assert progress.look_through(decode(5, 1, 2))[1].count(LAST) == 1


def test_a_prompt_finds_no_copies_for_later_layers() -> None:
    progress = begun(NEXT, LATER)
    wanted, stale = progress.look_through(Routing(1, Phase.PREFILL, EXPERTS, [[3, 0]]))
    assert (wanted, stale) == ([NEXT], [LATER]), "it streams through these slots"


def test_what_a_pass_has_left_is_not_taken_for_the_next_ones() -> None:
    """A wrong guess for the last layer, still under way when the next token begins, and for two layers more."""
    progress = begun(LATER, LAST)
    progress.adopt(LayerPlan(5, [], [], [], 0, {}))
    for layer in (0, 1):
        assert set(progress.look_through(decode(layer, 0, 1))[1]) == {LATER, LAST}
        progress.adopt(LayerPlan(layer, [], [], [], 0, {}))


def test_nothing_is_expected_after_an_interrupt() -> None:
    progress = begun(NEXT, LATER)
    progress.recover()
    progress.prefetch([Load(LAST, progress.table.pools[0].free_staging[0], None, False, LoadReason.PREFETCH, 0)])
    assert progress._expected == {LAST}


def test_what_will_be_missed_least_is_withdrawn() -> None:
    """Free slots first, then the residents that the policy would forget; of the pool that shrinks alone."""
    table = SlotTable(PoolSize(4, 1, (0,)), PoolSize(2, 1, (1,)))
    by_layer = {0: LRU(), 1: LRU()}
    progress = Progress(table, SizePools(by_layer), lambda load: progress.arrive(load.key))
    for layer, experts in ((1, [[5, 4]]), (0, [[2], [0], [1]])):
        for chosen in experts:
            routing = Routing(layer, Phase.DECODE, EXPERTS, [chosen])
            progress.eviction.observe(routing)
            progress.adopt(plan_layer(routing, table, progress.eviction, 9))
    assert len(progress.withdraw(table.pools[0], 3)) == 3
    table.check()
    assert set(table.cached()) == {(0, 1, EXACT), (1, 4, EXACT), (1, 5, EXACT)} == progress.eviction.residents()
    table.pools[0].give(2)
    table.check()
    assert table.pools[0].cache_slots == 3
