"""Every eviction policy against the contract and against an oracle of its own."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.errors import ConfigError
from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import Eviction, used_copies
from smoe.policy.eviction.score import ScoreWindow
from smoe.policy.registry import EVICTION, EVICTIONS, ONLINE_EVICTION, make_eviction
from smoe.routing import Phase, Routing
from tests.policy.contract import COPIES, EXPERTS, Event, EvictionContract, histories, make, routing, shield


@pytest.mark.parametrize("name", sorted(EVICTION))
class TestContract(EvictionContract):
    """The contract, for every policy that has a name."""


def test_the_policies_we_know_are_registered() -> None:
    assert set(EVICTION) >= {"auto", "lru", "lfu", "score", "multidimensional", "random", "belady"}


class ListLRU:
    """Oracle: residents in a list, the most recent at the end."""

    def __init__(self) -> None:
        self.order: list[ExpertKey] = []

    def apply(self, event: Event) -> None:
        if not isinstance(event, Routing):
            self.order.append(event[1]) if event[0] == "insert" else self.order.remove(event[1])
            return
        for key in sorted({(event.layer, e, EXACT) for row in event.top_k_index for e in row if e != event.experts}):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)


@given(events=histories(), shield=shield, count=st.integers(0, 12))
def test_lru_against_a_list(events: list[Event], shield: set[ExpertKey], count: int) -> None:
    oracle = ListLRU()
    for event in events:
        oracle.apply(event)
    eviction, _ = make("lru", events)
    assert eviction.victims(count, shield) == [key for key in oracle.order if key not in shield][:count]


@given(events=histories(), shield=shield, count=st.integers(0, 12))
def test_lfu_against_counting(events: list[Event], shield: set[ExpertKey], count: int) -> None:
    """A step counts once however many of its rows use an expert; counts outlive residency."""
    uses = {
        key: sum(
            key[0] == step.layer and any(key[1] in row for row in step.top_k_index)
            for step in events
            if isinstance(step, Routing)
        )
        for key in COPIES
    }
    eviction, resident = make("lfu", events)
    expected = sorted(resident - shield, key=lambda key: (uses[key], key))
    assert eviction.victims(count, shield) == expected[:count]


@given(trace=st.lists(routing, max_size=12), now=st.integers(0, 12), resident=st.sets(st.sampled_from(COPIES)))
def test_belady_against_looking_ahead(trace: list[Routing], now: int, resident: set[ExpertKey]) -> None:
    """Furthest next use first, never used again before all; a use in the present step is past."""

    def next_use(key: ExpertKey) -> int:
        later = (n for n, step in enumerate(trace) if n >= now and key in used_copies(step))
        return next(later, 10**6)

    eviction = EVICTIONS.find("belady")(trace)
    for key in resident:
        eviction.insert(key)
    for step in trace[:now]:
        eviction.observe(step)
    assert eviction.victims(len(COPIES), ()) == sorted(resident, key=lambda key: (-next_use(key), key))


@given(events=histories(), shield=shield, count=st.integers(0, 12), window=st.integers(0, 3))
def test_score_against_equation_three(events: list[Event], shield: set[ExpertKey], count: int, window: int) -> None:
    """The mean over steps j-n ... j of every expert's score, a step's score being the highest over its rows, a prompt's
    tokens being steps; layers compared by shares of their sum. Exact fractions; near ties are left to the policy."""
    steps: dict[int, list[list[Fraction]]] = {}
    eviction, resident = ScoreWindow(window), set()
    for event in events:
        if not isinstance(event, Routing):
            (eviction.insert if event[0] == "insert" else eviction.remove)(event[1])
            resident ^= {event[1]}
            continue
        eviction.observe(event)
        assert event.scores is not None
        rows = [
            [Fraction(score) / (sum(map(Fraction, row)) or 1) for score in row]
            for row, index in zip(event.scores, event.top_k_index, strict=True)
            if any(expert != EXPERTS for expert in index)
        ]
        if rows and event.phase is Phase.DECODE:
            rows = [[max(row[e] for row in rows) for e in range(EXPERTS)]]
        steps.setdefault(event.layer, []).extend(rows)

    def mean(key: ExpertKey) -> Fraction:
        kept = steps.get(key[0], [])[-(window + 1) :]
        return sum((step[key[1]] for step in kept), Fraction(0)) / max(1, len(kept))

    victims = eviction.victims(count, shield)
    expected = sorted(resident - shield, key=lambda key: (mean(key), key))[:count]
    assert [float(mean(key)) for key in victims] == pytest.approx([float(mean(key)) for key in expected])


def hits_of(eviction: Eviction, trace: list[int], slots: int) -> int:
    """The textbook cache: one object a step, load on miss, evict when full."""
    resident: set[ExpertKey] = set()
    hits = 0
    for expert in trace:
        step, key = Routing(0, Phase.DECODE, EXPERTS, [[expert]]), (0, expert, EXACT)
        eviction.observe(step)
        if key in resident:
            hits += 1
            continue
        if len(resident) == slots:
            (victim,) = eviction.victims(1, {key})
            eviction.remove(victim)
            resident.remove(victim)
        eviction.insert(key)
        resident.add(key)
    return hits


def best_possible_hits(trace: list[int], slots: int) -> int:
    """All ways to evict, tried one by one (states after each step with the most hits to get there)."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for expert in trace:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            if expert in held:
                choices = [(held, hits + 1)]
            elif len(held) < slots:
                choices = [(held | {expert}, hits)]
            else:
                choices = [((held - {victim}) | {expert}, hits) for victim in held]
            for state, count in choices:
                following[state] = max(count, following.get(state, -1))
        states = following
    return max(states.values())


@given(trace=st.lists(st.integers(0, EXPERTS - 1), max_size=14), slots=st.integers(1, 3))
def test_belady_is_the_best_possible(trace: list[int], slots: int) -> None:
    """Against every possible sequence of evictions, not against another policy."""
    future = [Routing(0, Phase.DECODE, EXPERTS, [[expert]]) for expert in trace]
    best = best_possible_hits(trace, slots)
    assert hits_of(EVICTIONS.find("belady")(future), trace, slots) == best
    for name in ONLINE_EVICTION:
        assert hits_of(make_eviction(name), trace, slots) <= best


def test_used_copies_are_sorted_unique_and_real() -> None:
    step = Routing(2, Phase.PREFILL, EXPERTS, [[3, 1], [1, EXPERTS], [0, 3]])
    assert used_copies(step) == [(2, 0, EXACT), (2, 1, EXACT), (2, 3, EXACT)]


def test_unknown_policies_are_refused_with_a_list() -> None:
    with pytest.raises(ConfigError, match=r"`eviction` is .fifo.; choose one of: auto, lru"):
        make_eviction("fifo")
    for name in set(EVICTION) - set(ONLINE_EVICTION):
        with pytest.raises(ConfigError, match=rf"\({name} .*smoe replay"):
            make_eviction(name)


def test_policies_are_fresh_and_named() -> None:
    for name in ONLINE_EVICTION:
        first, second = make_eviction(name), make_eviction(name)
        assert first is not second
        assert first.name == name
    assert all(a is not b for a, b in itertools.pairwise(map(EVICTIONS.find, EVICTION)))
