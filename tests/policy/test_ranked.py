"""The lowest values, whichever way they are found, against Python's sorting.

Would catch: ties that do not go to the lower index, an infinite value that hides others, an element that is found
twice.
"""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from smoe.policy.eviction.ranked import lowest


@pytest.mark.parametrize("count", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("size", [50, 150, 600])
@pytest.mark.parametrize("kind", ["all different", "ties", "infinite but for three"])
def test_lowest_against_sorting(kind: str, size: int, count: int) -> None:
    chance = np.random.default_rng(size + count)
    values = chance.random(size) if kind == "all different" else chance.integers(0, 5, size).astype(float)
    among = chance.random(size) < 0.9
    if kind == "infinite but for three":
        values[chance.permutation(size)[3:]] = inf
    before = values.copy()
    wanted = sorted(among.nonzero()[0].tolist(), key=lambda place: (values[place], place))[:count]
    assert lowest(values, among, count).tolist() == wanted
    assert (values == before).all()
