"""HOBBIT's cache against its equation, and what begins anew with a prompt.

Would catch a term that is left out, a record that outlives its sequence, a low use that counts as a high one.
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import EvictionSettings
from smoe.policy.eviction.lfu import LFU
from smoe.policy.eviction.multidimensional import WEIGHTS, Multidimensional
from smoe.policy.eviction.policies import are_cache_weights
from smoe.policy.eviction.random_choice import RandomChoice
from smoe.policy.registry import make_pools
from smoe.routing import Phase, Routing

LAYERS, EXPERTS = 3, 4
COPIES = [(layer, expert, EXACT) for layer in range(LAYERS) for expert in range(EXPERTS)]
_CHOICE = st.lists(st.integers(0, EXPERTS - 1), min_size=2, max_size=2, unique=True)


@st.composite
def passes(draw: st.DrawFn) -> list[Routing]:
    """Whole passes over the layers, as an engine makes them: prompts of some tokens, and steps of one or two rows."""
    found: list[Routing] = []
    for _ in range(draw(st.integers(1, 12))):
        phase, rows = draw(st.sampled_from(Phase)), draw(st.integers(1, 2))
        for layer in range(LAYERS):
            index = [draw(_CHOICE) for _ in range(rows)]
            low = draw(st.frozensets(st.integers(0, EXPERTS - 1)))
            found.append(Routing(layer, phase, EXPERTS, index, low=low))
    return found


def priorities(trace: list[Routing], weights: tuple[Fraction, ...], of_sequence: bool) -> dict[ExpertKey, Fraction]:
    """Equation 3 to the letter, from a list of what every token used."""
    tokens: list[dict[int, tuple[set[int], set[int]]]] = []
    before: Phase | None = None
    for at, routing in enumerate(trace):
        if routing.layer == 0:
            is_prompt = routing.phase is Phase.PREFILL
            if of_sequence and is_prompt and before is not Phase.PREFILL:
                tokens = []
            before = routing.phase
            rows = len(routing.top_k_index) if is_prompt else 1
            layers = trace[at : at + LAYERS]
            for row in range(rows):
                tokens.append({})
                for step in layers:
                    used = set(step.top_k_index[row]) if is_prompt else set().union(*step.top_k_index)
                    tokens[-1][step.layer] = used, used - step.low
    found = {}
    l_i, l_n, t = trace[-1].layer, LAYERS, len(tokens)
    for layer, expert, form in COPIES:
        uses = [number for number, token in enumerate(tokens, start=1) if expert in token[layer][0]]
        high = sum(expert in token[layer][1] for token in tokens)
        terms = (
            Fraction(max(uses, default=0), t),
            Fraction(len(uses), t),
            Fraction(high, t),
            1 - Fraction((layer - l_i + l_n) % l_n, l_n),
        )
        found[layer, expert, form] = sum((w * term for w, term in zip(weights, terms, strict=True)), Fraction(0))
    return found


weights = st.sampled_from([(8, 0, 0, 0), (0, 8, 0, 0), (0, 0, 8, 0), (0, 0, 0, 8), (2, 2, 2, 2), (1, 4, 2, 1)])


@given(trace=passes(), eighths=weights, of_sequence=st.booleans(), resident=st.sets(st.sampled_from(COPIES)))
def test_against_equation_three(
    trace: list[Routing], eighths: tuple[int, ...], of_sequence: bool, resident: set[ExpertKey]
) -> None:
    """Exact fractions; near ties are left to the policy."""
    policy = Multidimensional([n / 8 for n in eighths], of_sequence=of_sequence)
    for routing in trace:
        policy.observe(routing)
    for key in resident:
        policy.insert(key)
    expected = priorities(trace, tuple(Fraction(n, 8) for n in eighths), of_sequence)
    victims = policy.victims(len(COPIES), ())
    assert [float(expected[key]) for key in victims] == pytest.approx(sorted(float(expected[key]) for key in resident))
    assert [policy.worth(key) for key in COPIES] == pytest.approx([float(expected[key]) for key in COPIES])


def step(layer: int, *experts: int, low: frozenset[int] = frozenset(), phase: Phase = Phase.DECODE) -> Routing:
    return Routing(layer, phase, EXPERTS, [list(experts)], low=low)


def filled(policy: Multidimensional, *keys: tuple[int, int]) -> Multidimensional:
    for layer, expert in keys:
        policy.insert((layer, expert, EXACT))
    return policy


def test_of_equal_uses_the_one_that_needs_high_precision_stays() -> None:
    """The paper's figure 11: more uses, but low ones, are worth less."""
    often_low, seldom_high = (0, 0), (0, 1)
    by_high = filled(Multidimensional((0, 0, 1, 0)), often_low, seldom_high)
    by_uses = filled(Multidimensional((0, 1, 0, 0)), often_low, seldom_high)
    for policy in (by_high, by_uses):
        for low in (frozenset({0}), frozenset({0}), frozenset[int]()):
            policy.observe(step(0, 0, *([1] if not low else []), low=low or frozenset({0})))
    assert by_high.victims(1, ()) == [(0, 0, EXACT)]
    assert by_uses.victims(1, ()) == [(0, 1, EXACT)]


def test_a_prompt_begins_anew_and_the_next_chunk_of_it_does_not() -> None:
    policy = filled(Multidimensional((0, 1, 0, 0)), (0, 0), (0, 1))
    whole = filled(Multidimensional((0, 1, 0, 0), of_sequence=False), (0, 0), (0, 1))
    for routing in (step(0, 0), step(0, 0), step(0, 0), step(0, 1, phase=Phase.PREFILL)):
        policy.observe(routing)
        whole.observe(routing)
    assert policy.victims(1, ()) == [(0, 0, EXACT)], "its three uses were in another sequence"
    assert whole.victims(1, ()) == [(0, 1, EXACT)]
    policy.observe(step(0, 0, phase=Phase.PREFILL))
    assert policy.worth((0, 0, EXACT)) == policy.worth((0, 1, EXACT)) == 0.5, "two tokens of one prompt"


def test_layers_that_come_soon_stay() -> None:
    policy = filled(Multidimensional((0, 0, 0, 1)), (0, 3), (1, 3), (2, 3))
    policy.observe(step(2, 0))
    policy.observe(step(1, 0))
    assert policy.victims(3, ()) == [(0, 3, EXACT), (2, 3, EXACT), (1, 3, EXACT)]


def test_uses_of_all_sequences_are_lfu() -> None:
    """Counts that never begin anew rank as `lfu` does."""
    chance = random.Random(0)
    ours, lfu = Multidimensional((0, 1, 0, 0), of_sequence=False), LFU()
    for policy in (ours, lfu):
        for key in COPIES:
            policy.insert(key)
    for _ in range(50):
        for layer in range(LAYERS):
            routing = step(layer, *chance.sample(range(EXPERTS), 2))
            ours.observe(routing)
            lfu.observe(routing)
            assert ours.victims(5, ()) == lfu.victims(5, ())


def test_settings_reach_every_pool() -> None:
    settings = EvictionSettings("multidimensional", "layer", cache_weights=(0, 1, 0, 0), cache_records="model")
    pools = make_pools(settings, 4, LAYERS)
    for key in COPIES[:2]:
        pools.insert(key)
    for routing in (step(0, 0), step(0, 0), step(0, 1, phase=Phase.PREFILL)):
        pools.observe(routing)
    assert pools.victims(1, ()) == [(0, 1, EXACT)]


def test_what_weights_can_be() -> None:
    assert are_cache_weights(WEIGHTS)
    assert are_cache_weights((0.33, 0.33, 0.34, 0))
    for wrong in ((1, 0, 0), (0.5, 0.5, 0.5, -0.5), (0.3, 0.3, 0.3, 0), ("1", 0, 0, 0), (float("nan"), 1, 0, 0)):
        assert not are_cache_weights(wrong)  # type: ignore[arg-type]


def test_lots_are_fair_and_come_from_the_seed() -> None:
    """Every resident goes first about as often as any other: within five standard deviations."""
    first, second = RandomChoice(), RandomChoice()
    counts = dict.fromkeys(COPIES, 0)
    for policy in (first, second):
        for key in COPIES:
            policy.insert(key)
    draws = 2000
    for n in range(draws):
        first.observe(step(n % LAYERS, 0))
        second.observe(step(n % LAYERS, 0))
        (victim,) = first.victims(1, ())
        assert second.victims(1, ()) == [victim]
        counts[victim] += 1
    expected = draws / len(COPIES)
    assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())
