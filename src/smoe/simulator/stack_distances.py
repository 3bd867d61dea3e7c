"""Computes the misses of LRU caches of every size in one pass (Mattson et al., 1970).

The *stack distance* of a use is the number of other experts that were used since the last use of the same expert. The
use is a hit in a cache of n slots if its stack distance is below n. So the distances of all uses give the misses of all
sizes.
"""

from __future__ import annotations

import numpy as np

NEVER = np.iinfo(np.int64).max
"""The distance of a key that was not used before."""


def stack_distances(keys: np.ndarray) -> np.ndarray:
    """Return [n]: for each use in `keys` [n] (integers), the number of different other keys since the last use of the
    same key.

    O(n log^2 n). Let i be the position of a use, and p that of the previous use of the same key. Each other key between
    p and i is counted once, at its first use there: the previous use of that key is at p or before. For all uses up to
    p, the previous use is before p. So the distance is the number of uses before i whose previous use is at p or
    before, minus p + 1.
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
    """Return [n]: for each value, how many of the values to its left are at most as large.

    The values are divided into blocks whose size doubles. In each block, the values of the right half are looked up in
    the sorted left half. An offset for each block makes one sort and one search sufficient for all blocks.
    """
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
    """Return the misses of LRU caches with 0, 1, 2 ... slots, up to the number of different keys. Counted are the uses
    from number `skip` on.

    The uses before `skip` only fill the caches. The first use of a key in `keys` is a miss at every size.
    """
    distances = stack_distances(keys)[skip:]
    different = len(np.unique(keys))
    near = np.bincount(distances[distances != NEVER], minlength=different + 1)[: different + 1]
    hits = np.concatenate([[0], np.cumsum(near)[:different]])
    misses: np.ndarray = len(distances) - hits
    return misses
