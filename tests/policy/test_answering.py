"""A layer's misses answered, by hand: what is loaded first, what the CPU computes, what is spent of which step.

Would catch: an answer that no plan hears of, loads in another order than importance, a budget that is filled for every
layer instead of every step, rows that only pad and are paid for.
"""

from __future__ import annotations

import pytest

from smoe.expert import EXACT, LOW
from smoe.policy.answering import Answering, Assigned
from smoe.policy.answers import AnswerCosts
from smoe.policy.plan import DEVICE, HOST, Serve
from smoe.policy.prices import LayerPrices, PriceTable, Resolution
from smoe.policy.quality_budget import BURST_TOKENS, QualityBudget, TimeBudget
from smoe.policy.residency import PoolSize, SlotTable
from smoe.routing import Phase, Routing

EXPERTS, LAYERS = 8, 3
COSTS = AnswerCosts(high=1.0, low=0.25)
WEIGHTS = [0.4, 0.3, 0.2, 0.1]


def table() -> SlotTable:
    """Room for both formats, and nobody there yet: every choice is a miss."""
    return SlotTable(PoolSize(4, 2), PoolSize(4, 2, form=LOW))


def routing(layer: int = 0, rows: int = 1) -> Routing:
    """Each row chooses experts 4 to 7, in the order of importance; nobody is resident to be a substitute."""
    scores = [[0.0, 0.0, 0.0, 0.0, *WEIGHTS] for _ in range(rows)]
    chosen = [[4, 5, 6, 7] for _ in range(rows)]
    weights = [list(WEIGHTS) for _ in range(rows)]
    return Routing(layer, Phase.DECODE, EXPERTS, chosen, scores, rows, weights=weights)


def answering(prices: LayerPrices, budget: QualityBudget | TimeBudget) -> Answering:
    return Answering(PriceTable(dict.fromkeys(range(LAYERS), prices)), budget)


def test_loads_come_by_importance_and_the_cpu_gets_what_it_was_given() -> None:
    answers = {6: Resolution.HIGH, 4: Resolution.HOST, 5: Resolution.LOW, 7: Resolution.HIGH}
    keys = {4: EXACT, 5: LOW, 6: EXACT, 7: EXACT}
    missing = [Serve((0, expert, keys[expert]), (expert - 4,), True) for expert in (4, 5, 6, 7)]
    loaded, by_cpu = Assigned(answers).split(missing, routing())
    assert [serve.key[1] for serve in loaded] == [6, 5, 7]
    assert [(serve.key[1], serve.unit) for serve in by_cpu] == [(4, HOST)]
    assert all(serve.unit == DEVICE for serve in loaded)


def test_where_nothing_may_be_spent_all_are_loaded() -> None:
    answered = answering(LayerPrices(1e-3, 1.0, 1.0), QualityBudget(0.0, 1.0)).answer(routing(), table(), COSTS)
    assert answered.routing.top_k_index == [[4, 5, 6, 7]] and not answered.routing.low
    assert answered.assigned.answers == dict.fromkeys((4, 5, 6, 7), Resolution.HIGH)


def test_where_all_is_free_a_token_keeps_one_expert() -> None:
    """Index E stands for what is left out; who stays comes as what is loaded soonest."""
    free = answering(LayerPrices(0.0, 0.0, 0.0), QualityBudget(1.0, 1.0))
    answered = free.answer(routing(), table(), COSTS)
    (row,) = answered.routing.top_k_index
    (stays,) = [expert for expert in row if expert != EXPERTS]
    assert answered.assigned.answers == {stays: Resolution.LOW} and answered.routing.low == {stays}
    assert (free.nats, free.waited_seconds) == (0.0, COSTS.low)
    assert sum(replacement.substitute is None for replacement in answered.selection.replacements) == 3


def test_a_low_copy_is_asked_for_where_it_alone_is_cheap() -> None:
    answered = answering(LayerPrices(0.0, 1e6, 1e6), QualityBudget(1.0, 1.0)).answer(routing(), table(), COSTS)
    assert answered.routing.low == {4, 5, 6, 7} and answered.routing.top_k_index == [[4, 5, 6, 7]]


def test_a_steps_nats_are_for_all_its_layers() -> None:
    """A bucket that every layer filled would let three times as much through."""
    budget = QualityBudget(1e-3, 1e3)
    spending = answering(LayerPrices(1e-2, 1e-2, 1e-2), budget)
    for step in range(1, 40):
        for layer in range(LAYERS):
            spending.answer(routing(layer), table(), COSTS)
        assert spending.nats <= (step + BURST_TOKENS) * 1e-3 * (1 + 1e-9)
    assert spending.nats > 20e-3


@pytest.mark.parametrize("rows", [1, 3])
def test_a_time_hears_whole_steps_and_what_their_layers_waited_for(rows: int) -> None:
    timed = answering(LayerPrices(1.0, 1.0, 1.0), TimeBudget(100.0, 1e6))
    for layer in range(LAYERS):
        timed.answer(routing(layer, rows), table(), COSTS)
    assert timed.waited_seconds == pytest.approx(LAYERS * 4 * COSTS.high), "an expert is loaded once for all rows"
    timed.answer(routing(0, rows), table(), COSTS)
    assert timed.waited_seconds == pytest.approx(4 * COSTS.high), "a new step"
