"""How unimportant an expert is for a token, and in which precision it is therefore loaded (HOBBIT, arXiv 2411.01433,
section 3.2).

    routing weights, largest first      0.5     0.3     0.15     0.05         scaled to sum 1 for each token
    unimportance s                      0       0.5     0.8      0.95         the sum of the larger weights

    s <= T1: full copy                  T1 < s <= T2: low-precision copy      T2 < s: dropped

This applies to missing experts only: a resident full copy is always used. A token's expert of largest weight has s = 0.
In a batch, an expert has the least unimportance that it has for any token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from smoe.routing import Routing

_ROUNDING = 1e-6
"""The tolerance for rounding errors in sums of weights."""


class Thresholds(NamedTuple):
    """The thresholds T1 and T2 of an expert's unimportance s, with 0 <= `low` <= `skip` <= 1. Since s is at most 1, a
    threshold of 1 has no effect."""

    low: float = 1.0
    """T1: an expert with larger s is loaded as a low-precision copy."""
    skip: float = 1.0
    """T2: an expert with larger s is dropped."""


ALL_IMPORTANT = Thresholds()


def unimportance(weights: Sequence[float]) -> list[float]:
    """Return the unimportance of each expert that one token has chosen: the sum of the token's larger routing weights.
    Of equal weights, the first counts as larger.

    `weights`: [K], scaled to sum 1.
    """
    order = sorted(range(len(weights)), key=lambda k: -weights[k])
    found = [0.0] * len(weights)
    for place, before in zip(order, accumulate((weights[k] for k in order), initial=0.0), strict=False):
        found[place] = before
    return found


def least_unimportance(routing: Routing) -> dict[int, float]:
    """Return {expert: unimportance} for every expert that a step uses. If several tokens use an expert, it has its
    lowest unimportance among them. `routing.weights` must not be None."""
    assert routing.weights is not None
    least: dict[int, float] = {}
    for chosen, weights in zip(routing.top_k_index, routing.weights, strict=True):
        if chosen[0] == routing.experts:  # padding
            continue
        for expert, value in zip(chosen, unimportance(weights), strict=True):
            if value < least.get(expert, 2.0):
                least[expert] = value
    least.pop(routing.experts, None)
    return least


def graded(routing: Routing, thresholds: Thresholds) -> tuple[Routing, frozenset[int]]:
    """Return the routing and a set of experts. The field `low` of the routing contains the experts for which a
    low-precision copy suffices. The set contains the experts to drop if they are missing."""
    least = least_unimportance(routing)
    low = frozenset(expert for expert, value in least.items() if value > thresholds.low + _ROUNDING)
    skip = frozenset(expert for expert in low if least[expert] > thresholds.skip + _ROUNDING)
    return routing._replace(low=low), skip


def without(routing: Routing, gone: frozenset[int]) -> Routing:
    """Return the routing without the experts in `gone`: their routes get the index E, "no expert"."""
    none = routing.experts
    return routing._replace(
        top_k_index=[[none if expert in gone else expert for expert in row] for row in routing.top_k_index]
    )


def scaled(weights: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the rows of an array, each divided by its sum; rows of zeros are unchanged."""
    sums = [sum(row) or 1.0 for row in weights]
    return [[weight / total for weight in row] for row, total in zip(weights, sums, strict=True)]
