"""Replays a recorded routing through the engine's own planner, and counts hits and loads.

The limit with which a run is compared (`docs/metrics.md`) uses the misses of this replay on the run's own trace;
Belady's replay is the bound of all policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from smoe.expert import LOW
from smoe.policy.answering import Answered
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan_progress import carry_out
from smoe.policy.planner import layer_share
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import EXACT_SWITCHES, Switches, decide
from smoe.routing import Phase, Routing


@dataclass(frozen=True)
class ReplayCounts:
    """The uses of experts in a trace's decode steps."""

    uses: int
    misses: int
    low_misses: int = 0
    """Misses for which a low copy was loaded."""

    @property
    def hit_ratio(self) -> float:
        return 1.0 - self.misses / self.uses if self.uses else 1.0

    def penalty(self, low_cost: float) -> float:
        """Return the cost of the misses in loads of full copies, with `low_cost` for a low copy: HOBBIT's
        mixed-precision miss penalty, with the ratio of their bits."""
        return self.misses - (1.0 - low_cost) * self.low_misses


def replay(
    trace: Sequence[Routing],
    cache_slots: int,
    staging_slots: int,
    eviction: Eviction,
    switches: Switches = EXACT_SWITCHES,
    low_slots: int = 0,
    answer: Callable[[Routing, SlotTable], Answered] | None = None,
) -> ReplayCounts:
    """Replay `trace` from an empty cache. Only decode steps are counted; prefill steps warm the cache.

    With `low_slots` cache slots for low copies (and as many staging slots as the others have), `eviction` must rank
    copies of both formats; thresholds of `switches` below 1 require weights in the trace. `answer` resolves misses
    (`Answering.answer` at some costs); it requires scores and weights.

    Slots beyond the trace's needs are harmless. With an `alpha` above 0 (requires scores) missing low-score experts are
    substituted; the effect of that on later routing is not modelled. O(steps x experts used).
    """
    low = [PoolSize(low_slots, staging_slots, form=LOW)] if low_slots else []
    table = SlotTable(PoolSize(cache_slots, staging_slots), *low)
    share = layer_share(cache_slots, len({routing.layer for routing in trace}) or 1)
    uses = misses = low_misses = 0
    for routing in trace:
        plan = decide(routing, table, eviction, share, switches, answer=answer).plan
        if routing.phase is Phase.DECODE:
            uses += len(plan.serves)
            misses += len(plan.loads)
            low_misses += sum(load.key[2] == LOW for load in plan.loads)
        carry_out(plan, table, eviction)
    return ReplayCounts(uses, misses, low_misses)


def first_passes(trace: Iterable[Routing], passes: int) -> list[Routing]:
    """Return the routings of the first passes over the layers."""
    found: list[Routing] = []
    for routing in trace:
        passes -= not found or routing.layer <= found[-1].layer
        if passes < 0:
            break
        found.append(routing)
    return found


def replay_by_layer(
    trace: Sequence[Routing],
    cache_slots: int,
    staging_slots: int,
    eviction_for: Callable[[Sequence[Routing]], Eviction],
    switches: Switches = EXACT_SWITCHES,
) -> ReplayCounts:
    """Replay `trace` with a separate pool of slots for every layer: equal shares, with the rest for the first layers.

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
