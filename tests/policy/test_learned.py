"""The learned eviction: the contract with something learned, its numbers against plain sums, what it is for.

Would catch: a layer's distance that is off by one, a context that padding or other layers' silence changes, an estimate
that residency or order of loads touches, pools whose policies know nothing of what was learned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.eviction import learned as module
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.eviction.learned import DECAY, DISCOUNT, FEATURES, HORIZONS, Learned, NextUse, untrained
from smoe.policy.registry import LEARNED, make_eviction_for
from smoe.policy.residency import PoolSize
from smoe.routing import Phase, Routing
from tests.policy.contract import COPIES, EXPERTS, LAYERS, TOP_K, Event, EvictionContract, histories, lived_through

RANK = 3


def some(seed: int = 5) -> NextUse:
    """Anything that could have been learned, by lot."""
    chance = np.random.default_rng(seed)
    source, target = (chance.normal(size=(LAYERS, EXPERTS, RANK)).astype(np.float32) for _ in range(2))
    usual = source.mean(axis=1) * TOP_K
    offset = chance.normal(size=(LAYERS, EXPERTS)).astype(np.float32) / 8
    return NextUse(TOP_K / EXPERTS, chance.normal(size=FEATURES) / 4, source, usual, target, offset)


class WithSomethingLearned(EvictionContract):
    @staticmethod
    def make(name: str, events: Sequence[Event]) -> tuple[Eviction, set[ExpertKey]]:
        eviction = Learned(some())
        return eviction, lived_through(eviction, events)


@pytest.mark.parametrize("name", ["learned"])
class TestContract(WithSomethingLearned):
    """But for ties: experts with the same history are told apart by what was learned of them."""

    test_ties_break_by_layer_and_expert = None  # type: ignore[assignment]


def _worth_by_hand(learned: NextUse, events: Sequence[Event]) -> dict[ExpertKey, float]:
    """Both parts from their definitions, from the list of steps of every layer; plain numbers."""
    steps: dict[int, list[list[list[int]]]] = {layer: [] for layer in range(LAYERS)}
    running = 0
    for event in events:
        if not isinstance(event, Routing):
            continue
        running = event.layer
        rows = [chosen for row in event.top_k_index if (chosen := [e for e in row if e != EXPERTS])]
        if event.phase is Phase.DECODE:
            steps[running] += [rows] if rows else []
        else:
            steps[running] += [[row] for row in rows]
    context = np.zeros(RANK)
    for layer, of_layer in steps.items():
        for age, rows in enumerate(reversed(of_layer)):
            added = sum(learned.source[layer, e].astype(float) for row in rows for e in row) / len(rows)
            context += DECAY**age * (1 - DECAY) * (added - learned.usual[layer])
    worth = {}
    for layer, expert, form in COPIES:
        uses = [any(expert in row for row in rows) for rows in steps[layer]]
        first = 0.0
        if uses:
            known = [1.0, float(uses[-1])]
            for horizon in HORIZONS:
                ages = [2 ** (-age / horizon) for age in range(len(uses))]
                used = sum(weight for weight, is_used in zip(ages, reversed(uses), strict=True) if is_used)
                share = (used + 2 * learned.rate) / (sum(ages) + 2)
                known += [math.log(share / learned.rate), share]
            known.append(math.log((sum(uses) + 2 * learned.rate) / (len(uses) + 2) / learned.rate))
            first = 1 / (1 + math.exp(-sum(map(float.__mul__, known, learned.weights.tolist()))))
        second = float(learned.target[layer, expert] @ context) + float(learned.offset[layer, expert])
        value = max(first + math.sqrt(first * (1 - first)) * second, 0.02 * first)
        worth[layer, expert, form] = value * DISCOUNT ** ((layer - running - 1) % LAYERS / LAYERS)
    return worth


@given(events=histories())
def test_worth_against_plain_sums(events: list[Event]) -> None:
    learned = some()
    eviction = Learned(learned)
    lived_through(eviction, events)
    expected = _worth_by_hand(learned, events)
    found = [eviction.worth(key) for key in COPIES]
    assert found == pytest.approx([expected[key] for key in COPIES], rel=1e-4, abs=1e-6)


def _step(layer: int, *experts: int) -> Routing:
    return Routing(layer, Phase.DECODE, EXPERTS, [list(experts)])


def test_layers_that_come_round_soon_are_kept() -> None:
    """Experts with the same history in all layers: the layer that has just run goes first, the next one last."""
    eviction = Learned()
    for layer in range(LAYERS):
        eviction.insert((layer, 0, EXACT))
        eviction.observe(_step(layer, 0, 1))
    eviction.observe(_step(0, 2, 3))
    eviction.observe(_step(0, 0, 1))
    order = eviction.victims(LAYERS, ())
    assert [layer for layer, _, _ in order if layer] == [2, 1]


def test_what_was_chosen_tells_what_comes() -> None:
    """Expert 0 of layer 0 announces expert 3 of layer 1, and all else is alike: that one is kept."""
    learned = some()
    nothing = [np.zeros_like(part) for part in learned[2:]]
    source, usual, target, offset = nothing
    source[0, 0, 0] = target[1, 3, 0] = 1.0
    eviction = Learned(NextUse(0.5, np.zeros(FEATURES), source, usual, target, offset))
    for expert in (1, 2, 3):
        eviction.insert((1, expert, EXACT))
    eviction.observe(_step(1, 0))
    eviction.observe(_step(0, 1, 2))
    assert eviction.victims(1, ()) == [(1, 1, EXACT)] and eviction.worth((1, 3, EXACT)) == eviction.worth((1, 2, EXACT))
    eviction.observe(_step(0, 0, 2))
    assert eviction.victims(3, ())[-1] == (1, 3, EXACT)
    assert eviction.worth((1, 3, EXACT)) > eviction.worth((1, 2, EXACT))


def test_residency_and_order_of_loads_change_no_worth() -> None:
    heard = [_step(0, 0, 1), _step(1, 2, 3), _step(2, 1, 3)]
    first, second = Learned(some()), Learned(some())
    lived_through(first, [*heard, ("insert", (0, 1, EXACT)), ("insert", (2, 1, EXACT))])
    lived_through(second, [("insert", (2, 1, EXACT)), *heard, ("insert", (0, 1, EXACT))])
    assert first.victims(2, ()) == second.victims(2, ())
    assert [first.worth(key) for key in COPIES] == [second.worth(key) for key in COPIES]


def test_pools_have_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of two sizes, and low copies: every policy is made with it."""
    made: list[NextUse | None] = []

    class Noting(Learned):
        def __init__(self, next_use: NextUse | None = None) -> None:
            made.append(next_use)
            super().__init__(next_use)

    monkeypatch.setattr(module, "Learned", Noting)
    learned = some()
    sizes = [PoolSize(3, 2, (0, 1)), PoolSize(2, 2, (2,)), PoolSize(4, 2, (0, 1, 2), LOW)]
    eviction = make_eviction_for(
        EvictionSettings(LEARNED, next_use=learned), sizes, dict.fromkeys(range(LAYERS), EXPERTS)
    )
    assert made == [learned] * 3
    for key in ((0, 1, EXACT), (2, 1, EXACT), (0, 1, LOW)):
        eviction.insert(key)
    eviction.observe(_step(2, 0, 3))
    assert eviction.victims(5, ()) == [(2, 1, EXACT)]
    assert eviction.of(LOW).victims(5, ()) == [(0, 1, LOW)]


def test_nothing_learned_is_a_policy_too() -> None:
    assert untrained().weights.shape == (FEATURES,)
    eviction = Learned()
    lived_through(eviction, [("insert", (0, 0, EXACT)), ("insert", (0, 1, EXACT)), _step(0, 1), _step(0, 2)])
    assert eviction.victims(1, ()) == [(0, 0, EXACT)]
