"""Computes the misses of LRU caches of every size in one pass (Mattson et al., 1970).

A use hits in a cache of n slots if fewer than n other experts were used since its last use: its *stack distance*. So
the distances of a sequence of uses give the misses of all sizes.
"""

from __future__ import annotations

import numpy as np

NEVER = np.iinfo(np.int64).max
"""The distance of a key that has not been used before."""


def stack_distances(keys: np.ndarray) -> np.ndarray:
    """Return [n]: for each use in `keys` [n] (whole numbers), the number of different other keys used since that key's
    last use.

    O(n log^2 n). With p the position of a use's predecessor, a key used between p and i counts once, at the use whose
    own predecessor is at p or before; up to p all predecessors are. So the distance is the number of predecessors left
    of i that are at p or before, minus p + 1.
    """
    count = len(keys)
    order = np.argsort(keys, kind="stable")
    before = np.full(count, -1, np.int64)
    again = keys[order][1:] == keys[order][:-1]
    before[order[1:][again]] = order[:-1][again]
    distances = _at_most_left(before) - before - 1
    distances[before < 0] = NEVER
    return distances


def _at_most_left(values: np.ndarray) -> np.ndarray:
    """Return [n]: for each value, how many values left of it are at most as large. Every block is halved, and its right
    half is looked up in its sorted left half; an offset separates the blocks."""
    count = len(values)
    found = np.zeros(count, np.int64)
    if not count:
        return found
    places, span = np.arange(count), int(values.max() - values.min()) + 1
    lifted, half = values - values.min(), 1
    while half < count:
        block = places // (2 * half)
        is_left = places // half % 2 == 0
        apart = lifted + block * span
        left = np.sort(apart[is_left])
        right = ~is_left
        begin = block[right] * half  # every block with a right half has a complete left half
        found[right] += np.searchsorted(left, apart[right], side="right") - begin
        half *= 2
    return found


def misses_by_size(keys: np.ndarray, skip: int = 0) -> np.ndarray:
    """Return the misses of the uses from number `skip` on, in caches of 0, 1, 2 ... slots, up to the number of
    different keys.

    The uses before `skip` fill the caches and are not counted. The first use of a key in `keys` is a miss at every
    size.
    """
    distances = stack_distances(keys)[skip:]
    different = len(np.unique(keys))
    near = np.bincount(distances[distances != NEVER], minlength=different + 1)[: different + 1]
    hits = np.concatenate([[0], np.cumsum(near)[:different]])
    misses: np.ndarray = len(distances) - hits
    return misses
