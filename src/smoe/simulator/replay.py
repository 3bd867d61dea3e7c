"""Replays a recorded routing with the engine's planner, and counts hits and loads.

The lower bound with which a run is compared (`docs/metrics.md`) uses the misses of this replay on the run's own trace.
A replay with Belady's policy gives the bound for all policies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from smoe.expert import LOW
from smoe.policy.answering import Answered
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan_progress import carry_out
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import EXACT_SWITCHES, Switches, decide, layer_share
from smoe.routing import Phase, Routing


@dataclass(frozen=True)
class ReplayCounts:
    """How many experts the decode steps of a trace use, and how many of these uses are misses."""

    uses: int
    misses: int
    low_misses: int = 0
    """The misses for which a low-precision copy was loaded."""

    @property
    def hit_ratio(self) -> float:
        return 1.0 - self.misses / self.uses if self.uses else 1.0

    def penalty(self, low_cost: float) -> float:
        """Return the cost of the misses in loads of full copies, if a low-precision copy costs `low_cost` of a full
        one. This is HOBBIT's mixed-precision miss penalty."""
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
    """Replay `trace` from an empty cache. Only decode steps are counted; prefill steps fill the cache.

    `low_slots`: cache slots for low-precision copies, in addition to `cache_slots`, with as many staging slots.
    `eviction` must then rank copies of both formats. Thresholds of `switches` below 1 require weights in the trace.
    `answer`: resolves misses by quality cost (`Answering.answer` with fixed costs); it requires scores and weights.

    More slots than the trace needs do no harm. With an `alpha` above 0 (requires scores), missing low-score experts are
    substituted; the trace's later routing stays as recorded. O(steps x experts used).
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
    """Return the routings of the first `passes` passes over the layers."""
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
    """Replay `trace` with separate slots for every layer. The slots are divided equally among the layers; the first
    layers get the remainder.

    `eviction_for` returns the eviction policy of a layer, given the layer's routings of the trace.
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
