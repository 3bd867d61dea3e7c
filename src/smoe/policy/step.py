"""One step of one layer, decided: from what its router chose to what is computed and what is loaded.

    routing -> importance -> substitutes -> left out -> prefetched in vain: dropped -> statistics -> plan

The engine carries a decision out on hardware, the simulator on nothing; both make it here, so a recorded run that is
replayed gives the same plans.
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
    """The switches of `EngineConfig` that a decision depends on; the defaults are exact serving."""

    alpha: float = 0.0
    """Substitution threshold of decode steps; 0: the model's own choice."""
    drop: bool = False
    """Leave missing low-score experts out instead of replacing them."""
    share: bool = True
    """In a batch, prefer substitutes that serve several sequences."""
    prefill_keep: str = "last-uses"
    """What decides which experts of a prompt stay (`planner.PREFILL_KEEP`)."""
    thresholds: Thresholds = ALL_IMPORTANT
    """What missing experts of little importance come as, where there are low copies."""
    low_use: str = "asked"
    """Which experts low copies serve (`planner.LOW_USE`)."""

    @property
    def needs_weights(self) -> bool:
        """Whether `Routing.weights` must be there."""
        return self.thresholds != ALL_IMPORTANT


EXACT_SWITCHES = Switches()


class Decision(NamedTuple):
    """What becomes of one layer in one step."""

    routing: Routing
    """What is served: the router's choice with the substitutes in it, and the index E for what is left out."""
    selection: Selection | None
    """Who was replaced; None where substitution is off, or in a prompt."""
    plan: LayerPlan
    skipped: int = 0
    """Experts that are left out for their little importance."""


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
    """Select, learn and plan; `eviction` hears the step, `table` is only read.

    `routing.scores` must be there where `alpha` is above 0, else nothing is replaced; `routing.weights` where
    thresholds are below 1. `answer` says what becomes of a decode step's misses, in the place of all
    other switches; `layer_share` as for `plan_layer`. `drop_stale` is called with what will be served, and
    frees the staging slots of what was prefetched for this layer and is not wanted after all; `balance` is asked after
    that. Raises `BudgetError` where not one expert fits.
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
