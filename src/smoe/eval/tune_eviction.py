"""Trains the eviction policy `learned` for one model on recorded traces, and compares it with other policies on other
traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe.config import EngineConfig
from smoe.eval.model_traces import decode_steps, ledger_of_cache, trace_of
from smoe.eval.train_eviction import LayersShape, train
from smoe.load.next_use import TrainedNextUse
from smoe.models.read_spec import read_spec
from smoe.policy.budget import MIN_STAGING_SLOTS
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.eviction.learned import NextUse
from smoe.policy.registry import EVICTIONS, LEARNED
from smoe.policy.step import observation
from smoe.routing import Routing
from smoe.simulator.replay import first_passes, replay
from smoe.trace.file import Trace
from smoe.trace.record import TraceHeader

RIVALS = ("lru", "lfu", "score", "auto", "multidimensional", LEARNED, "belady")
ALL = 1 << 62
"""A number of passes that no trace exceeds: it means that all passes are used."""
COUNTED = 1000
"""The largest number of passes of a trace on which policies are compared."""

Tick = Callable[[str, int, int], None]
"""A function that is called with the present activity, the number of steps done and their total."""


@dataclass(frozen=True)
class EvictionTuning:
    """The trained estimate of the next use, and the misses of all policies for one cache size."""

    trained: TrainedNextUse
    slots: int
    resident_share: float
    uses: int
    """The number of expert uses in the counted decode steps of the training traces."""
    misses: dict[str, int]
    """{policy: its misses in the counted decode steps of the training traces}."""
    held_out_uses: int
    held_out: dict[str, int] | None
    """{policy: its misses on the held-out traces}; None if there are none."""

    def as_json(self) -> dict[str, Any]:
        return {
            "slots": self.slots,
            "resident_share": self.resident_share,
            "decode_steps": self.trained.decode_steps,
            "uses": self.uses,
            "misses": self.misses,
            "held_out_uses": self.held_out_uses,
            "held_out_misses": self.held_out,
        }


def tune_eviction(
    model: str,
    config: EngineConfig,
    revision: str | None,
    paths: Sequence[Path],
    held_out: Sequence[Path],
    passes: int | None,
    tick: Tick,
) -> EvictionTuning:
    """Train the estimate on the first `passes` passes of each trace (None: all). Return the estimate, and the misses of
    every policy in the first `COUNTED` passes of these traces and of the held-out traces, each from an empty cache.

    Raise `ConfigError` if the cache holds every expert, and for traces of another model or short traces. Raise
    `TraceError` for files that are not traces.
    """
    spec = read_spec(model, config, revision)
    ledger = ledger_of_cache(spec, config)
    traces, others = ([trace_of(path, spec) for path in of] for of in (paths, held_out))
    most = passes if passes is not None else ALL
    plain = [first_passes(trace.routings(), most) for trace in traces]
    next_use = train(plain, shape_of(traces[0].header), lambda done, total: tick("learning", done, total))
    count = _Counting(ledger.cache_slots, next_use, most, len(traces) + len(others), tick)
    misses, uses = count(traces)
    other_misses, other_uses = count(others)
    return EvictionTuning(
        TrainedNextUse(next_use, decode_steps(plain, spec)),
        ledger.cache_slots,
        ledger.resident_share,
        uses,
        misses,
        other_uses,
        other_misses if others else None,
    )


def shape_of(header: TraceHeader) -> LayersShape:
    """Return the layers of the recorded model that have experts."""
    layers = header.layers
    widest = max(layer.experts for layer in layers)
    return LayersShape([layer.layer for layer in layers], widest, max(layer.top_k for layer in layers))


def miss_counts(trace: Trace, slots: int, next_use: NextUse, passes: int) -> tuple[dict[str, int], int]:
    """Return ({policy: misses} in the first `passes` passes of one trace, the number of uses)."""
    plain = first_passes(trace.routings(), passes)
    counts = {}
    for name in RIVALS:
        has_scores = EVICTIONS.find(name).needs_scores and all(layer.rule is not None for layer in trace.header.layers)
        observed = first_passes(trace.routings(with_scores=True), passes) if has_scores else plain
        counts[name] = replay(observed, slots, MIN_STAGING_SLOTS, _policy(name, plain, next_use))
    return {name: count.misses for name, count in counts.items()}, counts[LEARNED].uses


class _Counting:
    """Counts the misses of each policy on several traces, and reports progress."""

    def __init__(self, slots: int, next_use: NextUse, passes: int, total: int, tick: Tick) -> None:
        self._slots, self._next_use, self._tick = slots, next_use, tick
        self._passes = min(passes, COUNTED)
        self._done, self._total = 0, total

    def __call__(self, traces: Sequence[Trace]) -> tuple[dict[str, int], int]:
        """Return ({policy: its misses} on all `traces` together, the number of uses of experts)."""
        misses, uses = dict.fromkeys(RIVALS, 0), 0
        for trace in traces:
            found, used = miss_counts(trace, self._slots, self._next_use, self._passes)
            misses = {name: misses[name] + found[name] for name in RIVALS}
            uses += used
            self._done += 1
            self._tick("counting misses", self._done, self._total)
        return misses, uses


def _policy(name: str, future: Sequence[Routing], next_use: NextUse) -> Eviction:
    settings = EvictionSettings(name, next_use=next_use, future=map(observation, future))
    return EVICTIONS.find(name).of_settings(settings)
