"""Shares of slots: would catch a layer that starves, one that hoards, and a promise of the contract that is broken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.lru import LRU
from smoe.policy.eviction.pools import LayerPools, SizePools
from smoe.policy.planner import layer_share
from smoe.policy.registry import ONLINE_EVICTION, make_eviction, make_pools
from smoe.routing import Phase, Routing
from smoe.simulator.replay import replay, replay_by_layer

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
    ours = replay(trace, slots, 2, make_pools("lru", "layer", slots, LAYERS))
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
