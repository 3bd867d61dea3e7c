"""What a layer's decision adds to the counters."""

from __future__ import annotations

from smoe.expert import LOW
from smoe.metrics import Counters
from smoe.policy.plan import DEVICE
from smoe.policy.residency import SlotTable
from smoe.policy.step import Decision
from smoe.policy.substitution import Selection
from smoe.routing import Phase, Routing


def count_selection(
    counters: Counters, selection: Selection, routing: Routing, table: SlotTable, is_answered: bool
) -> None:
    """Who was missing and who was replaced; `is_answered`: within a budget, by which some are served otherwise."""
    none = routing.experts
    counters.routes += sum(expert != none for row in routing.top_k_index for expert in row)
    counters.low_score += selection.low_score
    counters.low_score_missing += selection.low_score_missing
    counters.top_score_missing += selection.top_score_missing
    by_others = [entry for entry in selection.replacements if entry.substitute is not None]
    counters.substituted += len(by_others if is_answered else selection.replacements)
    counters.prefetches_top_score += sum(key[0] == routing.layer and key[1] in selection.top for key in table.staged)


def count_decision(counters: Counters, decision: Decision, routing: Routing, has_low: bool) -> None:
    """What is served, from where, and what is loaded for it."""
    plan = decision.plan
    elsewhere = sum(serve.unit != DEVICE for serve in plan.serves)
    counters.loads += len(plan.loads)
    if has_low and routing.phase is Phase.DECODE:
        counters.low_served += sum(serve.key[2] == LOW for serve in plan.serves)
        counters.low_loads += sum(load.key[2] == LOW for load in plan.loads)
    if routing.phase is Phase.DECODE:
        counters.skipped += decision.skipped
        counters.decode_uses += len(plan.serves)
        counters.decode_hits += plan.hits
        counters.host_computed += elsewhere
    else:
        counters.prefill_uses += len(plan.serves)
        counters.prefill_hits += plan.hits
        counters.prefill_host_computed += elsewhere
