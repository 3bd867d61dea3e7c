"""Fits the weights of the multidimensional cache for one model on recorded traces, and measures them on other
traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smoe.config import EngineConfig
from smoe.eval.model_traces import decode_steps, ledger_of_cache, trace_of
from smoe.models.read_spec import read_spec
from smoe.models.spec import ModelSpec
from smoe.policy.eviction.multidimensional import WEIGHTS
from smoe.policy.eviction.policies import CACHE_RECORDS
from smoe.routing import Routing
from smoe.runtime.substitution import substitution_of
from smoe.simulator.mixed_cache import CacheWeights, MixedCache, best_weights, miss_penalty, multidimensional, named
from smoe.simulator.replay import first_passes

RIVALS = ("lru", "lfu", "score", "random", "belady")
ALONE = {"lhu alone": (0.0, 0.0, 1.0, 0.0), "fld alone": (0.0, 0.0, 0.0, 1.0), "usual weights": WEIGHTS}
FITTED = "fitted weights"

Traces = Sequence[Sequence[Routing]]


@dataclass(frozen=True)
class CacheTuning:
    """The fitted weights of the multidimensional cache for one cache size, and the penalties of all policies."""

    cache: MixedCache
    resident_share: float
    records: str
    weights: CacheWeights
    decode_steps: int
    """The number of decode steps in the traces to which the weights were fitted."""
    penalties: dict[str, float]
    """For each policy, its penalty on these traces: the cost of its misses in loads of full copies."""
    held_out: dict[str, float] | None
    """{policy: penalty} on the held-out traces; None if there are none."""

    def as_json(self) -> dict[str, Any]:
        thresholds = self.cache.switches.thresholds
        return {
            "slots": self.cache.slots,
            "low_slots": self.cache.low_slots,
            "low_cost": self.cache.low_cost,
            "low_threshold": thresholds.low,
            "skip_threshold": thresholds.skip,
            "resident_share": self.resident_share,
            "cache_records": self.records,
            "cache_weights": list(self.weights),
            "decode_steps": self.decode_steps,
            "penalties": self.penalties,
            "held_out_penalties": self.held_out,
        }


def tune_cache(
    model: str,
    config: EngineConfig,
    revision: str | None,
    fitted: Sequence[Path],
    held_out: Sequence[Path],
    passes: int,
    tick: Callable[[int, int], None],
) -> CacheTuning:
    """Fit the weights to the first `passes` passes of each trace. Return the weights, and the penalties of every policy
    on these traces and on the held-out traces.

    `tick`: as for `best_weights`. Raise `ConfigError` if the cache holds every expert, or for traces of another model,
    and `TraceError` for files that are not traces.
    """
    spec = read_spec(model, config, revision)
    cache, share = _cache_of(spec, config)
    traces, others = ([_read(path, spec, passes) for path in paths] for paths in (fitted, held_out))
    records = config.cache_records or CACHE_RECORDS[0]
    weights, _ = best_weights(traces, cache, records, tick)
    return CacheTuning(
        cache,
        share,
        records,
        weights,
        decode_steps(traces, spec),
        _penalties(traces, cache, weights, records),
        _penalties(others, cache, weights, records) if others else None,
    )


def _cache_of(spec: ModelSpec, config: EngineConfig) -> tuple[MixedCache, float]:
    """Return (the cache sizes and settings of an engine with this configuration, the fraction of experts that are
    resident). Slots of several sizes are counted together."""
    ledger = ledger_of_cache(spec, config)
    low_slots = sum(pool.cache for pool in ledger.pools) - ledger.cache_slots
    low_cost = spec.low.expert_bytes / spec.expert_bytes if spec.low is not None else 1.0
    return MixedCache(ledger.cache_slots, low_slots, low_cost, substitution_of(config).switches), ledger.resident_share


def _read(path: Path, spec: ModelSpec, passes: int) -> list[Routing]:
    """Return the first `passes` passes of a trace, with the scores and weights that policies and importance need."""
    return first_passes(trace_of(path, spec).routings(with_scores=True, with_weights=True), passes)


def _penalties(traces: Traces, cache: MixedCache, weights: CacheWeights, records: str) -> dict[str, float]:
    found = {name: miss_penalty(traces, cache, named(name)) for name in RIVALS}
    for name, fixed in (ALONE | {FITTED: weights}).items():
        found[name] = miss_penalty(traces, cache, multidimensional(fixed, records))
    return found
