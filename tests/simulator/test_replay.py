"""Replays: frozen counts on a seeded trace, and Belady as the bound that no policy beats."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smoe.policy.eviction.belady import Belady
from smoe.policy.eviction.lru import LRU
from smoe.policy.registry import ONLINE_EVICTION, make_eviction
from smoe.routing import LAST_TOKENS, Phase, Routing
from smoe.simulator.replay import ReplayCounts, replay, replay_by_layer

LAYERS, EXPERTS, TOP_K, STEPS = 3, 16, 2, 200


def seeded_trace() -> list[Routing]:
    """A prompt, then decode steps whose experts are popular in Zipf's way and often those of the step before."""
    generator = random.Random(2026)
    popularity = [1 / (rank + 1) for rank in range(EXPERTS)]

    def chosen() -> list[int]:
        first = generator.choices(range(EXPERTS), popularity)[0]
        return [first, (first + generator.randrange(1, EXPERTS)) % EXPERTS]

    prompt = [Routing(layer, Phase.PREFILL, EXPERTS, [chosen() for _ in range(20)]) for layer in range(LAYERS)]
    before = [chosen() for _ in range(LAYERS)]
    steps: list[Routing] = []
    for _ in range(STEPS):
        before = [old if generator.random() < 0.4 else chosen() for old in before]
        steps += [Routing(layer, Phase.DECODE, EXPERTS, [before[layer]]) for layer in range(LAYERS)]
    return [*prompt, *steps]


FROZEN: dict[int, dict[str, int]] = {
    6: {"auto": 638, "learned": 896, "lfu": 922, "lru": 590, "multidimensional": 923, "score": 927, "belady": 528},
    12: {"auto": 524, "learned": 648, "lfu": 720, "lru": 499, "multidimensional": 637, "score": 688, "belady": 322},
    24: {"auto": 332, "learned": 346, "lfu": 402, "lru": 325, "multidimensional": 332, "score": 384, "belady": 150},
    36: {"auto": 158, "learned": 150, "lfu": 175, "lru": 153, "multidimensional": 144, "score": 175, "belady": 55},
    48: {"auto": 4, "learned": 4, "lfu": 4, "lru": 4, "multidimensional": 4, "score": 4, "belady": 4},
}
"""Misses of 1200 uses by cache slots and policy, as `print_table` prints them; a change here needs a reason in the
log. The trace has no scores, so the score window counts choices.
"""


def misses_at(slots: int) -> dict[str, int]:
    trace = seeded_trace()
    counts = {name: replay(trace, slots, 2, make_eviction(name)).misses for name in sorted(ONLINE_EVICTION)}
    return counts | {"belady": replay(trace, slots, 2, Belady(trace)).misses}


def print_table() -> None:
    for slots in FROZEN:
        print(f"    {slots}: {misses_at(slots)},")


@pytest.mark.parametrize("slots", FROZEN)
def test_frozen_misses(slots: int) -> None:
    """Would catch any change of a policy or of the planner, meant or not."""
    assert misses_at(slots) == FROZEN[slots]


def test_more_slots_fewer_misses_and_belady_first() -> None:
    table = [misses_at(slots) for slots in FROZEN]
    for name in table[0]:
        misses = [row[name] for row in table]
        assert misses == sorted(misses, reverse=True)
    assert all(row["belady"] <= min(row.values()) for row in table)
    assert all(row["belady"] < row["lru"] for row in table[:-1]), "the trace is too easy to tell policies apart"


def test_everything_resident_misses_each_expert_once() -> None:
    trace = seeded_trace()
    decode = [routing for routing in trace if routing.phase is Phase.DECODE]
    used = {(routing.layer, expert) for routing in decode for expert in routing.top_k_index[0]}
    counts = replay(decode, LAYERS * EXPERTS, 2, make_eviction("lru"))
    assert counts == ReplayCounts(uses=LAYERS * STEPS * TOP_K, misses=len(used))
    assert counts.hit_ratio == 1 - counts.misses / counts.uses


def test_an_empty_trace_and_one_of_padding() -> None:
    assert replay([], 4, 2, make_eviction("lru")) == ReplayCounts(0, 0)
    assert replay([], 4, 2, make_eviction("lru")).hit_ratio == 1
    padding = Routing(0, Phase.DECODE, EXPERTS, [[EXPERTS, EXPERTS]])
    assert replay([padding], 4, 2, make_eviction("lru")) == ReplayCounts(0, 0)


def test_replaying_twice_is_the_same() -> None:
    assert misses_at(12) == misses_at(12)


def test_policies_learn_what_the_engine_lets_them_learn() -> None:
    """All of a decode step, the end of a prompt; would catch a simulator that tells them more than the engine does."""
    heard: list[Routing] = []

    class Listening(LRU):
        def observe(self, routing: Routing) -> None:
            heard.append(routing)
            super().observe(routing)

    prompt = Routing(0, Phase.PREFILL, EXPERTS, [[0, 1]] * 8 + [[2, 3]] * LAST_TOKENS)
    step = Routing(0, Phase.DECODE, EXPERTS, [[0, 1]])
    replay([prompt, step], 4, 2, Listening())
    assert [len(routing.top_k_index) for routing in heard] == [LAST_TOKENS, 1]


single = st.builds(
    Routing,
    layer=st.integers(0, 1),
    phase=st.just(Phase.DECODE),
    experts=st.just(4),
    top_k_index=st.lists(st.integers(0, 3), min_size=1, max_size=1).map(lambda row: [row]),
    scores=st.none(),
)


@settings(max_examples=200, deadline=None)
@given(trace=st.lists(single, max_size=60), slots=st.integers(1, 8))
def test_no_policy_beats_belady(trace: list[Routing], slots: int) -> None:
    """One expert a step, where the optimum is proven; a use is a hit or a miss, never both."""
    best = replay(trace, slots, 2, Belady(trace))
    assert best.uses == len(trace)
    for name in ONLINE_EVICTION:
        assert replay(trace, slots, 2, make_eviction(name)).misses >= best.misses


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=60))
def test_pools_of_their_own_are_caches_of_their_own(uses: list[tuple[int, int]]) -> None:
    """A plain LRU list for every layer; would catch slots that wander between layers."""
    trace = [Routing(layer, Phase.DECODE, 6, [[expert]]) for layer, expert in uses]
    layers = sorted({layer for layer, _ in uses})
    room = {layer: 2 + (n < 1) for n, layer in enumerate(layers)}
    lists: dict[int, list[int]] = {layer: [] for layer in layers}
    misses = 0
    for layer, expert in uses:
        held = lists[layer]
        misses += expert not in held
        lists[layer] = [*(e for e in held if e != expert), expert][-room[layer] :]
    counts = replay_by_layer(trace, 2 * len(layers) + 1, 2, lambda part: make_eviction("lru"))
    assert (counts.uses, counts.misses) == (len(uses), misses)
