"""Decides one step of one layer: from its router's choice to the experts computed and loaded.

    routing -> importance -> substitutes -> dropped -> unused prefetches freed -> statistics -> plan

The engine executes a decision on hardware, the simulator without. Both decide here, so the replay of a recorded run
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
    """The settings of `EngineConfig` that affect a decision; the defaults are exact serving."""

    alpha: float = 0.0
    """The substitution threshold of decode steps; 0: no substitution."""
    drop: bool = False
    """Whether missing low-score experts are dropped instead of replaced."""
    share: bool = True
    """In a batch, whether substitutes that several sequences can use are preferred."""
    prefill_keep: str = "last-uses"
    """What decides which experts of a prompt stay (`planner.PREFILL_KEEP`)."""
    thresholds: Thresholds = ALL_IMPORTANT
    """The importance thresholds of missing experts, where there are low copies."""
    low_use: str = "asked"
    """Which experts low copies compute (`planner.LOW_USE`)."""

    @property
    def needs_weights(self) -> bool:
        """Whether `Routing.weights` is required."""
        return self.thresholds != ALL_IMPORTANT


EXACT_SWITCHES = Switches()


class Decision(NamedTuple):
    """The result of `decide`: how one layer of one step is computed."""

    routing: Routing
    """The routing that is computed: with substitutes, and the index E for dropped routes."""
    selection: Selection | None
    """The replaced routes; None where substitution is off, or in a prompt."""
    plan: LayerPlan
    skipped: int = 0
    """The number of experts that are dropped for their little importance."""


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
    """Substitute, update statistics and plan. `eviction` observes the step; `table` is only read.

    `routing.scores` is required where `alpha` is above 0 (without them nothing is replaced), `routing.weights` where
    thresholds are below 1. `answer` resolves a decode step's misses instead of all other settings; `layer_share` is as
    in `plan_layer`. `drop_stale` gets the final routing and frees the staging slots of unused prefetches; `balance` is
    called after it. Raises `BudgetError` where not one expert fits.
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
