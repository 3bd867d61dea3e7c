"""Decides one layer of one step: from the router's choice to the experts that are computed and loaded.

    routing -> importance -> substitutes -> dropped experts -> unused prefetches freed -> statistics -> plan

The engine executes a decision on hardware, the simulator without. Both call `decide`, so the replay of a recorded run
gives the same plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from smoe.policy.answering import Answered
from smoe.policy.balance import Sharing
from smoe.policy.eviction.base import Eviction
from smoe.policy.importance import ALL_IMPORTANT, Thresholds, graded, without
from smoe.policy.plan import LayerPlan
from smoe.policy.planner import plan_layer
from smoe.policy.residency import ExpertsAtHand, ExpertsUnderWay, SlotTable
from smoe.policy.substitution import Selection, applied, substitute
from smoe.routing import Phase, Routing, observation


class Switches(NamedTuple):
    """The settings of `EngineConfig` that affect a decision. The defaults mean exact serving."""

    alpha: float = 0.0
    """The substitution threshold of decode steps; 0: no substitution."""
    drop: bool = False
    """Whether missing low-score experts are dropped, not replaced."""
    share: bool = True
    """Whether, in a batch, substitutes that several sequences can use are preferred."""
    prefill_keep: str = "last-uses"
    """Which experts of a prompt become resident, one of `planner.PREFILL_KEEP`."""
    thresholds: Thresholds = ALL_IMPORTANT
    """The importance thresholds of missing experts, if there are low copies."""
    low_use: str = "asked"
    """Which experts are computed with their low copies, one of `planner.LOW_USE`."""

    @property
    def needs_weights(self) -> bool:
        """Whether `Routing.weights` is required."""
        return self.thresholds != ALL_IMPORTANT


EXACT_SWITCHES = Switches()


class Decision(NamedTuple):
    """The result of `decide`: how one layer of one step is computed."""

    routing: Routing
    """The routing that is computed, with substitutes and with the index E for dropped routes."""
    selection: Selection | None
    """The replaced routes; None if substitution is off, and for a prompt."""
    plan: LayerPlan
    skipped: int = 0
    """The number of experts that are dropped because of low importance, or of routes that a quality budget drops."""


def decide(
    routing: Routing,
    table: SlotTable,
    eviction: Eviction,
    layer_share: int,
    switches: Switches,
    balance: Callable[[], Sharing | None] | None = None,
    drop_stale: Callable[[Routing], None] | None = None,
    answer: Callable[[Routing, SlotTable], Answered] | None = None,
) -> Decision:
    """Return the decision for one layer of one step. `eviction` observes the step; `table` is only read. Raise
    `BudgetError` if not even one expert can be loaded.

    `routing.scores` is required if `alpha` is above 0; without scores nothing is replaced. `routing.weights` is
    required if thresholds are below 1. `layer_share`: as in `plan_layer`. `answer`: resolves the misses of decode steps
    by quality cost; `alpha` is ignored then. `drop_stale`: receives the final routing and frees the staging slots of
    unused prefetches. `balance`: called after that; returns what divides the misses between units.
    """
    selection, assigned, skip = None, None, frozenset[int]()
    if switches.needs_weights:
        routing, skip = graded(routing, switches.thresholds)
    here = ExpertsAtHand(routing.layer, table, routing.low)
    if answer is not None and routing.phase is Phase.DECODE:
        routing, selection, assigned = answer(routing, table)
    elif switches.alpha > 0 and routing.phase is Phase.DECODE and routing.scores is not None:
        under_way = ExpertsUnderWay(routing.layer, table)
        selection = substitute(
            routing, here, switches.alpha, share=switches.share, drop=switches.drop, under_way=under_way
        )
        routing = applied(selection, routing)
    gone = frozenset(expert for expert in skip if expert not in here)
    if gone:
        routing = without(routing, gone)
    if drop_stale is not None and table.staged:
        drop_stale(routing)
    eviction.observe(observation(routing))
    shared = assigned if assigned is not None or balance is None else balance()
    plan = plan_layer(routing, table, eviction, layer_share, shared, switches.prefill_keep, low_use=switches.low_use)
    skipped = len(gone)
    if assigned is not None and selection is not None:
        skipped = sum(replacement.substitute is None for replacement in selection.replacements)
    return Decision(routing, selection, plan, skipped)
