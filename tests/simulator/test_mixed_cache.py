"""The mixed-precision miss penalty, worked out by hand, and the search for weights against trying them all.

Would catch low misses at the price of high ones, a search that stops beside a better neighbour, a trial that is told
the future.
"""

from __future__ import annotations

import random
from itertools import product

from smoe.policy.importance import Thresholds
from smoe.policy.step import Switches
from smoe.routing import Phase, Routing
from smoe.simulator.mixed_cache import PARTS, MixedCache, best_weights, miss_penalty, multidimensional, named
from smoe.simulator.replay import first_passes, replay

EXPERTS = 8
SWITCHES = Switches(thresholds=Thresholds(0.6, 0.95))


def token(layer: int, *weights: tuple[int, float]) -> Routing:
    """A decode step that chooses these experts with these weights."""
    chosen = [expert for expert, _ in weights]
    return Routing(layer, Phase.DECODE, EXPERTS, [chosen], weights=[[weight for _, weight in weights]])


def test_a_penalty_by_hand() -> None:
    """Expert 0 weighs 0.7 and comes in high, expert 1 weighs 0.26 and comes in low, expert 2 not at all."""
    step = token(0, (0, 0.7), (1, 0.26), (2, 0.04))
    cache = MixedCache(2, 2, 0.25, SWITCHES)
    assert miss_penalty([[step]], cache, named("lru")) == 1.25
    assert miss_penalty([[step, step], [step]], cache, named("lru")) == 2.5, "each trace from an empty cache"
    others = [token(0, (n, 0.7), (n + 1, 0.3)) for n in (3, 5)]
    assert miss_penalty([[step, *others, step]], cache, named("lru")) == 1.25 * 4, "two high, two low slots: all miss"
    assert miss_penalty([[step, others[0], step]], cache, named("lru")) == 1.25 * 2


def test_without_low_copies_it_is_the_misses() -> None:
    trace = popular(50)
    cache = MixedCache(6, 0, 0.25, Switches())
    assert miss_penalty([trace], cache, named("lfu")) == replay(trace, 6, 2, named("lfu")(trace)).misses


def popular(steps: int, seed: int = 0) -> list[Routing]:
    """Three layers; some experts are often chosen with little weight, others seldom with much."""
    chance = random.Random(seed)
    found = []
    for _ in range(steps):
        for layer in range(3):
            first = chance.choices(range(EXPERTS), [1, 1, 1, 1, 2, 2, 3, 3])[0]
            second = chance.choice([e for e in (0, 1, 2, 3) if e != first])
            found.append(token(layer, (first, 0.75), (second, 0.25)))
    return found


def test_the_search_ends_where_no_neighbour_is_better() -> None:
    """Nor any point of the grid that it starts from; here it has to walk by long steps and by short ones."""
    traces, cache = [popular(60)], MixedCache(9, 6, 0.25, SWITCHES)
    heard: list[tuple[int, int]] = []
    weights, penalty = best_weights(traces, cache, tick=lambda done, least: heard.append((done, least)))
    assert penalty == miss_penalty(traces, cache, multidimensional(weights))
    found = [round(weight * PARTS) for weight in weights]
    assert sum(found) == PARTS and min(found) >= 0 and any(part % 4 for part in found)
    points = [point for point in product(range(PARTS + 1), repeat=4) if sum(point) == PARTS]
    near = [point for point in points if sum(abs(a - b) for a, b in zip(point, found, strict=True)) == 2]
    coarse = [point for point in points if not any(part % 4 for part in point)]
    assert len(near) == 12 and len(coarse) == 20
    for lru, lfu, lhu, fld in near + coarse:
        weights = (lru / PARTS, lfu / PARTS, lhu / PARTS, fld / PARTS)
        assert miss_penalty(traces, cache, multidimensional(weights)) >= penalty
    assert [done for done, _ in heard] == list(range(1, len(heard) + 1)) and heard[-1][1] >= heard[-1][0]
    assert len(heard) < 100


def test_high_uses_count_where_low_ones_are_cheap() -> None:
    """The paper's reason for LHU: it costs less than LFU where an expert's many uses are low ones."""
    traces, cache = [popular(200)], MixedCache(9, 6, 0.25, SWITCHES)
    lfu, lhu = ((0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0))
    assert miss_penalty(traces, cache, multidimensional(lhu)) < 0.95 * miss_penalty(
        traces, cache, multidimensional(lfu)
    )


def test_every_policy_has_a_penalty() -> None:
    traces, cache = [popular(20)], MixedCache(9, 6, 0.25, SWITCHES)
    penalties = {name: miss_penalty(traces, cache, named(name)) for name in ("lru", "score", "random", "belady")}
    assert min(penalties, key=penalties.__getitem__) == "belady"
    assert miss_penalty(traces, cache, multidimensional((0, 1, 0, 0), "model")) > 0


def test_first_passes() -> None:
    trace = popular(5)
    assert first_passes(trace, 2) == trace[:6]
    assert first_passes(trace, 9) == trace and first_passes([], 3) == [] == first_passes(trace, 0)
