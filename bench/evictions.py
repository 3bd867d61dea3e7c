"""What each eviction policy would have missed, on recorded traces and on random routing, at several sizes of the cache.

    python -m bench.evictions stories.trace code.trace ... [--shares 4,10,20,40,60] [--steps 1200] [--out FILE.json]
        [--learn train.trace ...]

The engine's own planner replays every trace (`smoe record` writes them) from an empty cache, without prefetch. The last
row of each size is uniform random routing of the first trace's shape, from a fixed seed: it has no scores, so `score`
counts choices there. `belady` knows the future. Prints a table of misses and ends with one JSON line.

With `--learn` the estimate of `--eviction learned` is trained on these traces, of other text, and joins in: as it is,
for a model that nobody has trained it for (`untrained`), and with the next token's choices in all layers known beside
it (`token known`): a bound for whoever foresees one token. Random routing is then left out, and what deciding costs is
added: microseconds of processor time for each layer heard and for each question for victims.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from smoe import __version__
from smoe.eval.replay_times import TimedEviction
from smoe.eval.train_eviction import train
from smoe.eval.tune_eviction import shape_of
from smoe.policy.budget import MIN_STAGING_SLOTS
from smoe.policy.eviction.auto import Adaptive
from smoe.policy.eviction.base import Eviction
from smoe.policy.eviction.belady import Belady
from smoe.policy.eviction.learned import Learned, NextUse
from smoe.policy.registry import make_eviction
from smoe.policy.step import observation
from smoe.routing import Phase, Routing
from smoe.simulator.replay import first_passes, replay
from smoe.trace.file import Trace
from smoe.trace.record import TraceHeader

NAMED = ("lru", "lfu", "score")
POLICIES = (*NAMED, "auto", "belady")
LEARNED = (*NAMED, "auto", "multidimensional", "untrained", "learned", "token known", "belady")
SEED = 10


def main() -> None:
    options = _parse()
    shares = [float(share) / 100 for share in options.shares.split(",")]
    rows: list[dict[str, Any]] = []
    shape = Trace(options.traces[0]).header
    if options.learn:
        _main_learned(options, shares)
        return
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
        counts = replay(scored if policy.needs_scores else plain, slots, MIN_STAGING_SLOTS, policy)
        misses[name] = counts.misses
    best = min(misses[name] for name in NAMED)
    return {
        "slots": slots,
        "uses": counts.uses,
        "misses": misses,
        "auto_over_best": misses["auto"] / best - 1 if best else 0.0,
        "rule_at_the_end": adaptive.rule,
    }


def _main_learned(options: argparse.Namespace, shares: Sequence[float]) -> None:
    """Every policy, the learned one among them, on text that it has not seen."""
    shape = Trace(options.traces[0]).header
    began = perf_counter()
    next_use = train([Trace(path).routings() for path in options.learn], shape_of(shape))
    seconds = perf_counter() - began
    print("trace         resident  " + "".join(f"{name:>17}" for name in LEARNED) + "  gap closed")
    rows: list[dict[str, Any]] = []
    for path in options.traces:
        plain = first_passes(Trace(path).routings(), options.steps)
        scored = first_passes(Trace(path).routings(with_scores=True), options.steps)
        for share in shares:
            row = {"trace": path.stem, "resident_share": share}
            rows.append(row | measure_learned(plain, scored, int(shape.experts * share), next_use))
            cells = "".join(f"{rows[-1]['misses'][name]:17d}" for name in LEARNED)
            print(f"{path.stem:<20} {share:>4.0%}  {cells}  {rows[-1]['gap_closed']:.1%}", flush=True)
    result = {
        "smoe": __version__,
        "model": shape.model,
        "steps": options.steps,
        "learned_from": [path.stem for path in options.learn],
        "training_seconds": seconds,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    print(json.dumps(result))


def measure_learned(
    plain: Sequence[Routing], scored: Sequence[Routing], slots: int, next_use: NextUse
) -> dict[str, Any]:
    """Misses and costs of every policy on one trace, and how much of the way from the best of LRU, LFU and score to
    Belady the learned one goes."""
    misses, costs = {}, {}
    for name in LEARNED:
        policy = TimedEviction(eviction := _learned(name, plain, next_use))
        observed = scored if eviction.needs_scores else plain
        misses[name] = replay(observed, slots, MIN_STAGING_SLOTS, policy).misses
        costs[name] = policy.microseconds()
    best = min(misses[name] for name in NAMED)
    gap = best - misses["belady"]
    return {
        "slots": slots,
        "uses": sum(len(row) for routing in plain for row in routing.top_k_index if routing.phase is Phase.DECODE),
        "misses": misses,
        "gap_closed": (best - misses["learned"]) / gap if gap else 0.0,
        "auto_gap_closed": (best - misses["auto"]) / gap if gap else 0.0,
        "token_known_gap_closed": (best - misses["token known"]) / gap if gap else 0.0,
        "microseconds": costs,
    }


def _learned(name: str, future: Sequence[Routing], next_use: NextUse) -> Eviction:
    if name == "token known":
        return _TokenKnown(next_use, future)
    if name in ("learned", "untrained"):
        return Learned(next_use if name == "learned" else None)
    return _policy(name, future)


class _TokenKnown(Learned):
    """Knows what all layers choose until the running one comes round again; beyond that, the learned estimate."""

    def __init__(self, next_use: NextUse, future: Sequence[Routing]) -> None:
        super().__init__(next_use)
        self._future = [observation(routing) for routing in future]
        self._round = len({routing.layer for routing in future})
        self._now = -1

    def observe(self, routing: Routing) -> None:
        super().observe(routing)
        self._now += 1

    def _values(self) -> np.ndarray:
        values = super()._values()
        for ahead, routing in enumerate(self._future[self._now + 1 : self._now + 1 + self._round]):
            chosen = {expert for row in routing.top_k_index for expert in row if expert != routing.experts}
            values[routing.layer, sorted(chosen)] = 2.0 + self._round - ahead
        return values


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--shares", default="4,10,20,40,60", help="sizes in percent of all experts")
    parser.add_argument("--steps", type=int, default=1200, help="of each trace, from its beginning")
    parser.add_argument("--learn", type=Path, nargs="+", help="traces that the learned estimate is trained on")
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
