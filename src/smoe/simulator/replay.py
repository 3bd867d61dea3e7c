"""Replay a recorded routing through the engine's own planner and count hits and loads.

The limit that a run is measured against (`docs/metrics.md`) uses the misses that this replay counts for the run's
own trace; Belady's replay beside it says what no policy could beat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smoe.policy.eviction.base import Eviction
from smoe.policy.plan_progress import carry_out
from smoe.policy.planner import layer_share
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import EXACT_SWITCHES, Switches, decide
from smoe.routing import Phase, Routing


@dataclass(frozen=True)
class ReplayCounts:
    """Expert uses of the decode steps of a trace."""

    uses: int
    misses: int

    @property
    def hit_ratio(self) -> float:
        return 1.0 - self.misses / self.uses if self.uses else 1.0


def replay(
    trace: Sequence[Routing],
    cache_slots: int,
    staging_slots: int,
    eviction: Eviction,
    switches: Switches = EXACT_SWITCHES,
) -> ReplayCounts:
    """Serve `trace` from an empty cache; only decode steps are counted, prefill steps warm the cache.

    Slots beyond the trace's needs are harmless. With an `alpha` above 0 (the trace must have scores) missing low-score
    experts are substituted; that the model would then have routed otherwise is not seen. O(steps x experts used).
    """
    table = SlotTable(PoolSize(cache_slots, staging_slots))
    share = layer_share(cache_slots, len({routing.layer for routing in trace}) or 1)
    uses = misses = 0
    for routing in trace:
        plan = decide(routing, table, eviction, share, switches).plan
        if routing.phase is Phase.DECODE:
            uses += len(plan.serves)
            misses += len(plan.loads)
        carry_out(plan, table, eviction)
    return ReplayCounts(uses, misses)


def replay_by_layer(
    trace: Sequence[Routing],
    cache_slots: int,
    staging_slots: int,
    eviction_for: Callable[[Sequence[Routing]], Eviction],
    switches: Switches = EXACT_SWITCHES,
) -> ReplayCounts:
    """`replay` with a pool of slots for every layer instead of one for all: equal shares, the first get the rest.

    `eviction_for` makes the policy of a layer from that layer's part of the trace.
    """
    layers: dict[int, list[Routing]] = {}
    for routing in trace:
        layers.setdefault(routing.layer, []).append(routing)
    share, rest = divmod(cache_slots, len(layers) or 1)
    counts = [
        replay(part, share + (n < rest), staging_slots, eviction_for(part), switches)
        for n, (_, part) in enumerate(sorted(layers.items()))
    ]
    return ReplayCounts(sum(count.uses for count in counts), sum(count.misses for count in counts))
