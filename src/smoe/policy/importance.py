"""How unimportant an expert is for a token, and the precision that follows (HOBBIT, arXiv 2411.01433, section 3.2).

    routing weights, largest first      0.5     0.3     0.15     0.05         each row scaled to sum 1
    unimportance s                      0       0.5     0.8      0.95         the sum of the weights before

    s <= T1: the full copy              T1 < s <= T2: a low copy suffices      T2 < s: dropped

This applies to missing experts only: a resident copy is used as it is. The first expert is always important. In a batch
an expert is as important as it is to the token for which it matters most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from smoe.routing import Routing

_ROUNDING = 1e-6
"""The tolerance for rounding errors in sums of weights."""


class Thresholds(NamedTuple):
    """Two bounds of an expert's unimportance s, 0 <= `low` <= `skip` <= 1. Since s <= 1, a bound of 1 has no effect."""

    low: float = 1.0
    """T1: above it, a low copy suffices."""
    skip: float = 1.0
    """T2: above it, an expert is dropped."""


ALL_IMPORTANT = Thresholds()


def unimportance(weights: Sequence[float]) -> list[float]:
    """Return the unimportance of one token's choices, in their order: the sum of the larger weights; of equal weights
    the first counts as larger.

    `weights` [K] must be scaled to sum 1.
    """
    order = sorted(range(len(weights)), key=lambda k: -weights[k])
    found = [0.0] * len(weights)
    for place, before in zip(order, accumulate((weights[k] for k in order), initial=0.0), strict=False):
        found[place] = before
    return found


def least_unimportance(routing: Routing) -> dict[int, float]:
    """Return the unimportance of every expert that a step uses, for the token for which it matters most.

    `routing.weights` must not be None.
    """
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
    """Return the routing with the experts for which a low copy suffices, and the experts that are not worth a load."""
    least = least_unimportance(routing)
    low = frozenset(expert for expert, value in least.items() if value > thresholds.low + _ROUNDING)
    skip = frozenset(expert for expert in low if least[expert] > thresholds.skip + _ROUNDING)
    return routing._replace(low=low), skip


def without(routing: Routing, gone: frozenset[int]) -> Routing:
    """Return the routing without some experts: their routes get the index E, "no expert"."""
    none = routing.experts
    return routing._replace(
        top_k_index=[[none if expert in gone else expert for expert in row] for row in routing.top_k_index]
    )


def scaled(weights: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the rows scaled to sum 1; rows of zeros are unchanged."""
    sums = [sum(row) or 1.0 for row in weights]
    return [[weight / total for weight in row] for row, total in zip(weights, sums, strict=True)]
