"""What each eviction policy would have missed, on recorded traces and on random routing, at several sizes of the cache.

    python -m bench.evictions stories.trace code.trace ... [--shares 4,10,20,40,60] [--steps 1200] [--out FILE.json]

The engine's own planner replays every trace (`smoe record` writes them) from an empty cache, without prefetch. The last
row of each size is uniform random routing of the first trace's shape, from a fixed seed: it has no scores, so `score`
counts choices there. `belady` knows the future. Prints a table of misses and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smoe import __version__
from smoe.policy.budget import MIN_STAGING_SLOTS
from smoe.policy.eviction.auto import Adaptive
from smoe.policy.eviction.base import Eviction
from smoe.policy.eviction.belady import Belady
from smoe.policy.registry import SCORED_EVICTION, make_eviction
from smoe.policy.rows import observation
from smoe.routing import Phase, Routing
from smoe.simulator.replay import first_passes, replay
from smoe.trace.file import Trace
from smoe.trace.record import TraceHeader

NAMED = ("lru", "lfu", "score")
POLICIES = (*NAMED, "auto", "belady")
SEED = 10


def main() -> None:
    options = _parse()
    shares = [float(share) / 100 for share in options.shares.split(",")]
    rows: list[dict[str, Any]] = []
    shape = Trace(options.traces[0]).header
    print(
        "trace                 resident  slots    "
        + "".join(f"{name:>9}" for name in POLICIES)
        + "   auto against best"
    )
    for path in [*options.traces, None]:
        plain = first_passes(Trace(path).routings(), options.steps) if path else _random(shape, options.steps)
        scored = first_passes(Trace(path).routings(with_scores=True), options.steps) if path else plain
        name, experts = (path.stem, Trace(path).header.experts) if path else ("random", shape.experts)
        for share in shares:
            rows.append({"trace": name, "resident_share": share} | measure(plain, scored, int(experts * share)))
            _print(rows[-1])
    result = {"smoe": __version__, "model": shape.model, "steps": options.steps, "seed": SEED, "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    print(json.dumps(result))


def measure(plain: Sequence[Routing], scored: Sequence[Routing], slots: int) -> dict[str, Any]:
    """Misses of every policy on one trace in `slots` slots, and how far `auto` is from the best that has a name."""
    adaptive = Adaptive()
    misses: dict[str, int] = {}
    for name in POLICIES:
        policy: Eviction = adaptive if name == "auto" else _policy(name, plain)
        counts = replay(scored if name in SCORED_EVICTION else plain, slots, MIN_STAGING_SLOTS, policy)
        misses[name] = counts.misses
    best = min(misses[name] for name in NAMED)
    return {
        "slots": slots,
        "uses": counts.uses,
        "misses": misses,
        "auto_over_best": misses["auto"] / best - 1 if best else 0.0,
        "rule_at_the_end": adaptive.rule,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--shares", default="4,10,20,40,60", help="sizes in percent of all experts")
    parser.add_argument("--steps", type=int, default=1200, help="of each trace, from its beginning")
    parser.add_argument("--out", type=Path, help="the result as a file, too")
    return parser.parse_args()


def _random(shape: TraceHeader, steps: int) -> list[Routing]:
    """Decode steps in which every expert is as likely as any other."""
    chance = random.Random(SEED)
    return [
        Routing(layer.layer, Phase.DECODE, layer.experts, [sorted(chance.sample(range(layer.experts), layer.top_k))])
        for _ in range(steps)
        for layer in shape.layers
    ]


def _policy(name: str, future: Sequence[Routing]) -> Eviction:
    return Belady(map(observation, future)) if name == "belady" else make_eviction(name)


def _print(row: dict[str, Any]) -> None:
    cells = "".join(f"{row['misses'][name]:9d}" for name in POLICIES)
    cache = f"{row['resident_share']:>8.0%}  {row['slots']:5d}"
    print(f"{row['trace']:<21} {cache}    {cells}   {row['auto_over_best']:+.1%}", flush=True)


if __name__ == "__main__":
    main()
