"""Resolves the misses of decode steps within a limit of quality or time, and adds up the quality cost and the time
spent.

    router's choice -> missing experts -> a resolution for each (`answers.py`), from quality costs (`prices.py`) and a
                       rate (`quality_budget.py`) -> the routing with substitutes, low copies and dropped routes

Engine and simulator have one `Answering` each. It reads no clock: the costs of loads are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from smoe.policy.answers import AnswerCosts, choose
from smoe.policy.missing_experts import missing_experts
from smoe.policy.plan import HOST, Serve
from smoe.policy.prices import PriceTable, Resolution
from smoe.policy.quality_budget import QualityBudget, TimeBudget
from smoe.policy.residency import ExpertsAtHand, LowCopiesHere, SlotTable
from smoe.policy.substitution import Selection, applied
from smoe.routing import Routing, real_rows


class Answered(NamedTuple):
    """The resolutions of one layer's misses: the routing that results from them, and the routes that were changed."""

    routing: Routing
    """The routing with substitutes, and with the index E for dropped routes. Its field `low` names the experts that are
    computed with their low-precision copies."""
    selection: Selection
    """The routes that a substitute computes, and the dropped routes."""
    assigned: Assigned


class Assigned(NamedTuple):
    """The resolution of each missing expert, in the form in which the planner uses a `Balance`."""

    answers: dict[int, Resolution]
    """{expert: resolution}, the most important expert first."""

    def split(self, missing: Sequence[Serve], routing: Routing) -> tuple[list[Serve], list[Serve]]:
        """Return (experts to load, most important first; experts for the CPU)."""
        del routing
        rank = {expert: n for n, expert in enumerate(self.answers)}
        ranked = sorted(missing, key=lambda serve: rank.get(serve.key[1], len(rank)))
        host = {expert for expert, answer in self.answers.items() if answer is Resolution.HOST}
        on_host = [serve._replace(unit=HOST) for serve in ranked if serve.key[1] in host]
        return [serve for serve in ranked if serve.key[1] not in host], on_host


class Answering:
    """Resolves the misses of each layer, within a limit on quality or time that all layers and steps share."""

    def __init__(self, prices: PriceTable, budget: QualityBudget | TimeBudget) -> None:
        self._prices = prices
        self._budget = budget
        self._layer = inf
        self.nats = 0.0
        """The quality cost spent so far, in nats."""
        self.waited_seconds = 0.0
        """Predicted seconds of waiting for missing experts in this step."""

    def answer(self, routing: Routing, table: SlotTable, costs: AnswerCosts) -> Answered:
        """Return the resolutions of one layer's misses in a decode step, and record their quality cost and seconds.
        `routing` must have scores and weights; `table` is the slot table, which records the resident experts."""
        if routing.layer <= self._layer:
            self._begin_step(routing)
        self._layer = routing.layer
        layer, budget = routing.layer, self._budget
        missing = missing_experts(routing, ExpertsAtHand(layer, table), LowCopiesHere(layer, table))
        limit = budget.limit if isinstance(budget, QualityBudget) else inf
        top_k = len(routing.top_k_index[0])
        chosen = choose(missing, costs, self._prices.layers[layer], budget.rate, top_k, limit)
        if isinstance(budget, QualityBudget):
            budget.spend(chosen.nats, chosen.wanted_nats)
        self.nats += chosen.nats
        self.waited_seconds += chosen.seconds
        low = frozenset(expert for expert, answer in chosen.served.items() if answer is Resolution.LOW)
        selection = Selection(chosen.replacements, 0, 0, 0)
        return Answered(applied(selection, routing)._replace(low=low), selection, Assigned(chosen.served))

    def note_step(self, seconds: float) -> None:
        """Record the duration of a decode step. A limit of time adapts to it."""
        if isinstance(self._budget, TimeBudget):
            self._budget.note(seconds, self.waited_seconds)

    def _begin_step(self, routing: Routing) -> None:
        self.waited_seconds = 0.0
        if isinstance(self._budget, QualityBudget):
            rows = real_rows(routing)
            self._budget.begin_step(len(routing.top_k_index) if rows is None else len(rows))
