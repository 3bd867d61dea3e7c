"""The one step: in which order things are decided, and what each part is given.

Would catch: a policy that hears of experts before substitutes took their place, a plan made while slots of a wrong
guess were still taken, a prompt in which experts are replaced.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from smoe.policy.eviction.lru import LRU
from smoe.policy.plan import Load, LoadReason
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import Switches, decide
from smoe.policy.substitution import applied, substitute
from smoe.routing import Phase, Routing

EXPERTS = 6
SCORES = [0.30, 0.25, 0.24, 0.23, 0.01, 0.01]
"""Experts 0 and 1 are chosen; with alpha 0.3 both are low-score against rank 3's 0.24, and 2 and 3 like them."""


class Told(LRU):
    """Writes down what it hears, and when."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def observe(self, routing: Routing) -> None:
        self.events.append(("observe", [list(row) for row in routing.top_k_index]))
        super().observe(routing)


def table_with(*experts: int) -> tuple[SlotTable, Told]:
    """Four cache slots and two staging slots, with these experts of layer 0 resident."""
    table, eviction = SlotTable(PoolSize(4, 2)), Told([])
    for slot, expert in enumerate(experts):
        table.begin(Load((0, expert, 0), slot, None, True, LoadReason.DEMAND, 0))
        table.arrive((0, expert, 0))
        eviction.insert((0, expert, 0))
    return table, eviction


def step(phase: Phase = Phase.DECODE, scores: list[float] | None = SCORES) -> Routing:
    return Routing(0, phase, EXPERTS, [[0, 1]], None if scores is None else [scores])


def test_substitutes_first_then_what_is_stale_then_statistics_then_shares_then_the_plan() -> None:
    table, eviction = table_with(0, 2)
    table.begin(Load((0, 5, 0), 4, None, False, LoadReason.PREFETCH, 0))  # guessed, and not wanted
    table.arrive((0, 5, 0))
    events = eviction.events

    def drop_stale(routing: Routing) -> None:
        events.append(("drop", [list(row) for row in routing.top_k_index]))
        table.release((0, 5, 0))

    def balance() -> None:
        events.append(("balance", (0, 5, 0) in table.ready))

    decision = decide(step(), table, eviction, 2, Switches(alpha=0.3), balance, drop_stale)
    assert events == [("drop", [[0, 2]]), ("observe", [[0, 2]]), ("balance", False)]
    assert decision.selection is not None
    assert [(r.active, r.substitute) for r in decision.selection.replacements] == [(1, 2)]
    assert [serve.key[1] for serve in decision.plan.serves] == [0, 2] and not decision.plan.loads
    assert set(table.pools[0].free_staging) == {4, 5} and not decision.plan.spare, (
        "the wrong guess's slot is spare again"
    )


@pytest.mark.parametrize("switches", [Switches(0.3), Switches(0.3, drop=True), Switches(0.9, share=False)])
def test_the_selection_is_substitutions_own(switches: Switches) -> None:
    table, eviction = table_with(2, 3)
    expected = substitute(step(), {2, 3}, switches.alpha, share=switches.share, drop=switches.drop)
    decision = decide(step(), table, eviction, 2, switches)
    assert decision.selection == expected and expected.replacements
    assert decision.routing == applied(expected, step())


@pytest.mark.parametrize(
    ("routing", "switches"),
    [
        (step(), Switches()),
        (step(Phase.PREFILL), Switches(alpha=0.9)),
        (step(scores=None), Switches(alpha=0.9)),
    ],
    ids=["exact", "prompt", "no scores"],
)
def test_nothing_is_replaced_where_nothing_may_be(routing: Routing, switches: Switches) -> None:
    table, eviction = table_with(2, 3)
    decision = decide(routing, table, eviction, 2, switches)
    assert decision.selection is None and decision.routing is routing
    assert sorted(serve.key[1] for serve in decision.plan.serves) == [0, 1]


def test_the_table_is_only_read() -> None:
    table, eviction = table_with(0, 2, 3)
    before = pickle.dumps(table)
    decide(step(), table, eviction, 2, Switches())
    assert pickle.dumps(table) == before
