"""Shares of slots: would catch a layer that starves, one that hoards, and a promise of the contract that is broken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.eviction.lfu import LFU
from smoe.policy.eviction.lru import LRU
from smoe.policy.eviction.pools import FormPools, LayerPools, SizePools
from smoe.policy.registry import EVICTION, EVICTIONS, ONLINE_EVICTION, make_eviction, make_eviction_for, make_pools
from smoe.policy.residency import PoolSize
from smoe.policy.step import layer_share
from smoe.routing import Phase, Routing
from smoe.simulator.replay import replay, replay_by_layer
from tests.policy.contract import Event, EvictionContract, lived_through

LAYERS, EXPERTS = 3, 8
USES = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), min_size=1, max_size=80)


def filled(uses: list[tuple[int, int]], share: int) -> tuple[LayerPools, set[ExpertKey]]:
    """Everything used becomes resident; the last use's layer is the running one."""
    pools, residents = LayerPools(LRU, share), set()
    for layer, expert in uses:
        key = (layer, expert, EXACT)
        if key not in residents:
            pools.insert(key)
            residents.add(key)
        pools.observe(Routing(layer, Phase.DECODE, EXPERTS, [[expert]]))
    return pools, residents


@given(USES, st.integers(1, 6), st.integers(0, 30), st.sets(st.integers(0, EXPERTS - 1)))
def test_the_contract(uses: list[tuple[int, int]], share: int, count: int, shielded: set[int]) -> None:
    pools, residents = filled(uses, share)
    shield = {(uses[-1][0], expert, EXACT) for expert in shielded}
    victims = pools.victims(count, shield)
    assert victims == pools.victims(count, shield), "asking changes nothing"
    assert len(set(victims)) == len(victims) == min(count, len(residents - shield))
    assert set(victims) <= residents - shield
    assert pools.victims(count + 1, shield)[: len(victims)] == victims


@given(USES, st.integers(1, 4))
def test_nobody_takes_from_the_poor(uses: list[tuple[int, int]], share: int) -> None:
    """A layer with its share gives up its own; one without it takes from those that have more."""
    pools, residents = filled(uses, share)
    running = uses[-1][0]
    sizes = {layer: sum(key[0] == layer for key in residents) for layer in range(LAYERS)}
    (victim,) = pools.victims(1, ())
    rich = [layer for layer in range(LAYERS) if layer != running and sizes[layer] > share]
    if sizes[running] < share and rich:
        assert sizes[victim[0]] == max(sizes[layer] for layer in rich)
    else:
        assert victim[0] == running


@given(USES)
def test_full_pools_are_caches_of_their_own(uses: list[tuple[int, int]]) -> None:
    """After a prompt has filled every share, the engine's pools and separate caches miss the same."""
    share = 4
    prompt = [Routing(layer, Phase.PREFILL, EXPERTS, [[0], [1], [2], [3]]) for layer in range(LAYERS)]
    trace = [*prompt, *(Routing(layer, Phase.DECODE, EXPERTS, [[expert]]) for layer, expert in uses)]
    slots = share * LAYERS
    assert layer_share(slots, LAYERS) == share
    ours = replay(trace, slots, 2, make_pools(EvictionSettings("lru", "layer"), slots, LAYERS))
    assert ours == replay_by_layer(trace, slots, 2, lambda part: make_eviction("lru"))


@given(USES, st.integers(0, 30), st.sets(st.integers(0, EXPERTS - 1)), st.sampled_from(sorted(ONLINE_EVICTION)))
def test_slots_of_another_size_are_nobody_s_victims(
    uses: list[tuple[int, int]], count: int, shielded: set[int], name: str
) -> None:
    large, small = make_eviction(name), make_eviction(name)
    pools, residents = SizePools({0: large, 1: small, 2: large}), set()
    for layer, expert in uses:
        if (key := (layer, expert, EXACT)) not in residents:
            pools.insert(key)
            residents.add(key)
        pools.observe(Routing(layer, Phase.DECODE, EXPERTS, [[expert]]))
    running = uses[-1][0]
    shield = {(running, expert, EXACT) for expert in shielded}
    fitting = {key for key in residents if (key[0] == 1) == (running == 1)}
    victims = pools.victims(count, shield)
    assert pools.residents() == residents
    assert len(set(victims)) == len(victims) == min(count, len(fitting - shield))
    assert set(victims) <= fitting - shield


def in_form_pools(name: str, events: Sequence[Event]) -> tuple[Eviction, set[ExpertKey]]:
    """What `make` makes, behind the pools of two formats."""
    future = [event for event in events if isinstance(event, Routing)]
    pools = FormPools({form: EVICTIONS.find(name)(*([future] if name == "belady" else [])) for form in (EXACT, LOW)})
    return pools, lived_through(pools, events)


@pytest.mark.parametrize("name", sorted(EVICTION))
class TestFormContract(EvictionContract):
    """The contract, for every policy behind the pools of two formats."""

    make = staticmethod(in_form_pools)


_FORMS = st.sampled_from([EXACT, LOW])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)),
        st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1), _FORMS),
    ),
    max_size=60,
)
"""Two numbers: a use; three: a copy that comes, or that leaves where it is there."""


@given(EVENTS, st.integers(0, 30), st.sets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 7), _FORMS)), _FORMS)
def test_each_format_is_ranked_as_by_a_policy_of_its_own(
    events: list[tuple[int, ...]], count: int, shield: set[ExpertKey], form: int
) -> None:
    """Real keys in and out; would catch a victim of another format, a shield that is not understood."""
    pools, alone = FormPools({EXACT: LRU(), LOW: LFU()}), {EXACT: LRU(), LOW: LFU()}
    residents: set[ExpertKey] = set()
    for event in events:
        if len(event) == 2:
            routing = Routing(event[0], Phase.DECODE, EXPERTS, [[event[1]]])
            for policy in (pools, *alone.values()):
                policy.observe(routing)
            continue
        key = (event[0], event[1], event[2])
        exact = (event[0], event[1], EXACT)
        if key in residents:
            pools.remove(key)
            alone[key[2]].remove(exact)
        else:
            pools.insert(key)
            alone[key[2]].insert(exact)
        residents ^= {key}
    assert pools.residents() == residents
    part = pools.of(form)
    assert part.residents() == {key for key in residents if key[2] == form}
    shielded = {(layer, expert, EXACT) for layer, expert, of in shield if of == form}
    expected = [(layer, expert, form) for layer, expert, _ in alone[form].victims(count, shielded)]
    assert part.victims(count, shield) == expected
    assert pools.victims(count, shield) == pools.of(EXACT).victims(count, shield)
    for layer, expert, _ in shielded:
        assert part.worth((layer, expert, form)) == alone[form].worth((layer, expert, EXACT))
        assert pools.worth((layer, expert, form)) == part.worth((layer, expert, form))


def test_a_policy_for_each_format_where_there_are_low_slots() -> None:
    experts = dict.fromkeys(range(LAYERS), EXPERTS)
    exact = [PoolSize(4, 2, (0, 1)), PoolSize(3, 2, (2,))]
    plain = make_eviction_for(EvictionSettings("lru"), exact, experts)
    assert isinstance(plain, SizePools)
    both = make_eviction_for(EvictionSettings("lru"), [*exact, PoolSize(5, 2, (0, 1, 2), LOW)], experts)
    assert isinstance(both, FormPools)
    for key in ((0, 1, EXACT), (0, 1, LOW), (2, 3, EXACT), (2, 4, LOW)):
        both.insert(key)
    both.observe(Routing(2, Phase.DECODE, EXPERTS, [[0]]))
    assert both.of(LOW).victims(9, ()) == [(0, 1, LOW), (2, 4, LOW)]
    assert both.of(EXACT).victims(9, ()) == [(2, 3, EXACT)], "only slots that layer 2's experts fit"
    assert both.rule == "lru"


def test_auto_is_plain_where_all_of_a_format_fit() -> None:
    sizes = [PoolSize(4, 2), PoolSize(LAYERS * EXPERTS, 2, (), LOW)]
    pools = make_eviction_for(EvictionSettings("auto"), sizes, dict.fromkeys(range(LAYERS), EXPERTS))
    assert pools.rule == "fading-counts, lru"
