"""What a cache of every size would have missed, in one go (Mattson et al., 1970), for the least recently used going
first.

A use hits in a cache of n slots if fewer than n other experts were used since its last use: its *stack distance*. So
the distances of a stretch of uses are the misses of all sizes at once.
"""

from __future__ import annotations

import numpy as np

NEVER = np.iinfo(np.int64).max
"""The distance of what has not been used before."""


def stack_distances(keys: np.ndarray) -> np.ndarray:
    """[n]: of each use in `keys` [n] (whole numbers), how many different others were used since that key's last use.

    O(n log^2 n). With p the place of a use's predecessor, what lies between p and i is counted once each where its own
    predecessor is at p or before; up to p all predecessors are. So the distance is how many predecessors left of i are
    at p or before, less p + 1.
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
    """[n]: how many numbers left of each one are at most as large. Every block is halved, and how many of its left
    half are at most as large is looked up for its right half; blocks are separated by what is added to them."""
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
        begin = block[right] * half  # every block with a right half has a whole left one
        found[right] += np.searchsorted(left, apart[right], side="right") - begin
        half *= 2
    return found


def misses_by_size(keys: np.ndarray, skip: int = 0) -> np.ndarray:
    """Misses of the uses from number `skip` on in caches of 0, 1, 2 ... slots, up to as many as different keys.

    The uses before `skip` fill the caches and are not counted. What has not been used in all of `keys` counts as a
    miss at every size.
    """
    distances = stack_distances(keys)[skip:]
    different = len(np.unique(keys))
    near = np.bincount(distances[distances != NEVER], minlength=different + 1)[: different + 1]
    hits = np.concatenate([[0], np.cumsum(near)[:different]])
    misses: np.ndarray = len(distances) - hits
    return misses
