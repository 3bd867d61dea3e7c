"""Stack distances beside a list that is really moved through, and caches of every size that are really filled."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest

from smoe.simulator.stack_distances import NEVER, misses_by_size, stack_distances


def drawn(count: int, different: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [min(int(chance.expovariate(4 / different)), different - 1) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "different"), [(0, 1), (1, 1), (2, 1), (2, 2), (7, 3), (64, 9), (333, 40), (1000, 700)]
)
def test_distances_are_places_in_the_stack(count: int, different: int) -> None:
    keys, stack, expected = drawn(count, different, count), list[int](), []
    for key in keys:
        expected.append(stack.index(key) if key in stack else NEVER)
        if key in stack:
            stack.remove(key)
        stack.insert(0, key)
    assert stack_distances(np.array(keys, np.int64)).tolist() == expected


@pytest.mark.parametrize("skip", [0, 1, 150, 300])
def test_every_size_misses_as_a_cache_of_it_does(skip: int) -> None:
    keys = drawn(300, 30, 5)
    found = misses_by_size(np.array(keys, np.int64), skip)
    assert len(found) == len(set(keys)) + 1
    for slots, misses in enumerate(found):
        assert misses == cache_misses(keys, slots, skip), slots


def cache_misses(keys: list[int], slots: int, skip: int) -> int:
    """Of a cache that forgets what was used longest ago, from number `skip` on."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for number, key in enumerate(keys):
        misses += key not in cache and number >= skip
        cache.pop(key, None)
        cache[key] = None
        if len(cache) > slots:
            cache.popitem(last=False)
    return misses
