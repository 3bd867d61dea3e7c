"""What evictions cost where missing experts of little importance come as low copies: HOBBIT's cache beside others.

    python -m bench.mixed_cache stories.trace code.trace ... [--shares 20,40] [--out FILE.json]

Every second trace is the first half, the others are the second. Weights are fitted on each half (`smoe tune --cache`)
and judged on the other, so that every trace is judged once, whole, by weights that have not seen it. The penalty of a
replay is its misses in loads of the model's own copies (a low one costs `--low-cost`), from an empty cache, prompts not
counted. `belady` keeps what is used next, whatever it costs: a bound of misses, not of the penalty. Prints a table for
each share and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smoe import __version__
from smoe.policy.eviction.multidimensional import WEIGHTS
from smoe.policy.eviction.policies import CACHE_RECORDS
from smoe.policy.importance import Thresholds, graded, least_unimportance
from smoe.policy.step import Switches
from smoe.routing import Phase, Routing
from smoe.simulator.mixed_cache import MixedCache, best_weights, miss_penalty, multidimensional, named
from smoe.simulator.replay import first_passes
from smoe.trace.file import Trace

POLICIES = ("lru", "lfu", "score", "auto", "random", "belady")
FIXED = {
    "last use": (1.0, 0.0, 0.0, 0.0),
    "uses": (0.0, 1.0, 0.0, 0.0),
    "high uses": (0.0, 0.0, 1.0, 0.0),
    "distance": (0.0, 0.0, 0.0, 1.0),
    "equal": (0.25, 0.25, 0.25, 0.25),
    "usual": WEIGHTS,
}
"""Weights of the multidimensional cache that nobody fits."""


def main() -> None:
    options = _parse()
    traces = [Trace(path) for path in options.traces]
    header = traces[0].header
    whole = [list(trace.routings(with_scores=True, with_weights=True)) for trace in traces]
    halves = [list(range(first, len(traces), 2)) for first in (0, 1)]
    thresholds = Thresholds(*map(float, options.thresholds.split(",")))
    if options.grades is not None:
        thresholds = _thresholds_for(whole, *(float(part) / 100 for part in options.grades.split(",")))
    result: dict[str, Any] = {
        "smoe": __version__,
        "model": header.model,
        "traces": [path.stem for path in options.traces],
        "fitted_passes": options.fitted,
        "thresholds": thresholds,
        "shares_of_uses": _grades(whole, thresholds),
        "low_cost": options.low_cost,
        "sizes": [],
    }
    print(f"{header.model}: uses in high precision, low, left out: {result['shares_of_uses']}")
    for share in (float(share) / 100 for share in options.shares.split(",")):
        slots = int(header.experts * share)
        low_bytes = slots * options.low_share / (1 - options.low_share)
        cache = MixedCache(slots, int(low_bytes / options.low_cost), options.low_cost, Switches(thresholds=thresholds))
        result["sizes"].append(measure(whole, halves, cache, options.fitted))
        _print(result["sizes"][-1], header.experts)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    print(json.dumps(result))


def measure(
    traces: Sequence[Sequence[Routing]], halves: Sequence[Sequence[int]], cache: MixedCache, passes: int
) -> dict[str, Any]:
    """Penalties by policy, for every trace; of fitted weights by those that were fitted on the other half."""
    penalties = {name: [miss_penalty([trace], cache, named(name)) for trace in traces] for name in POLICIES}
    fitted: dict[str, Any] = {}
    for records in CACHE_RECORDS:
        for name, weights in FIXED.items():
            make = multidimensional(weights, records)
            penalties[f"{name} ({records})"] = [miss_penalty([trace], cache, make) for trace in traces]
        found = []
        row = [0.0] * len(traces)
        for half, others in (halves, halves[::-1]):
            weights, _ = best_weights([first_passes(traces[n], passes) for n in half], cache, records)
            found.append(weights)
            for n in others:
                row[n] = miss_penalty([traces[n]], cache, multidimensional(weights, records))
        penalties[f"fitted ({records})"], fitted[records] = row, found
    return {"slots": cache.slots, "low_slots": cache.low_slots, "weights": fitted, "penalties": penalties}


def _grades(traces: Sequence[Sequence[Routing]], thresholds: Thresholds) -> list[float]:
    """Of all uses in decode steps, the shares that ask for high precision, for low, and for nothing."""
    uses = low = skip = 0
    for routing in (routing for trace in traces for routing in trace if routing.phase is Phase.DECODE):
        marked, skipped = graded(routing, thresholds)
        uses += len({expert for row in routing.top_k_index for expert in row})
        low += len(marked.low)
        skip += len(skipped)
    return [round(part / uses, 4) for part in (uses - low, low - skip, skip)]


def _thresholds_for(traces: Sequence[Sequence[Routing]], high: float, low: float) -> Thresholds:
    """Thresholds by which such shares of all uses in decode steps ask for high and for low precision."""
    decode = (routing for trace in traces for routing in trace if routing.phase is Phase.DECODE)
    values = sorted(value for routing in decode for value in least_unimportance(routing).values())
    return Thresholds(values[int(high * (len(values) - 1))], values[int((high + low) * (len(values) - 1))])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="+", help="of one model")
    parser.add_argument("--shares", default="20,40", help="sizes of the high cache in percent of all experts")
    parser.add_argument("--low-share", type=float, default=0.15, help="of the slots' bytes, those of low copies")
    parser.add_argument("--low-cost", type=float, default=4.5 / 16, help="of a low copy: int4 with scales beside bf16")
    parser.add_argument("--thresholds", default="0.6,0.9", help="T1 and T2 of the paper")
    parser.add_argument("--grades", help="instead: percent of uses in high and in low precision, such as 67,30")
    parser.add_argument("--fitted", type=int, default=150, help="passes of each trace that weights are fitted on")
    parser.add_argument("--out", type=Path, help="the result as a file, too")
    return parser.parse_args()


def _print(size: dict[str, Any], experts: int) -> None:
    penalties = {name: sum(row) for name, row in size["penalties"].items()}
    print(f"\n{size['slots']} of {experts} experts, {size['low_slots']} low copies; weights {size['weights']}")
    print(f"{'eviction':<22} {'penalty':>9} {'to random':>10} {'to LRU':>8} {'to LFU':>8}")
    for name, penalty in penalties.items():
        beside = [f"{penalty / penalties[other] - 1:+.1%}" for other in ("random", "lru", "lfu")]
        print(f"{name:<22} {penalty:9.0f} {beside[0]:>10} {beside[1]:>8} {beside[2]:>8}", flush=True)


if __name__ == "__main__":
    main()
