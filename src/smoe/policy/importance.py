"""How little an expert matters to a token: HOBBIT's unimportance, and what it asks for (arXiv 2411.01433, section 3.2).

    routing weights, largest first      0.5     0.3     0.15     0.05         each row scaled to sum 1
    unimportance s                      0       0.5     0.8      0.95         the sum of those before

    s <= T1: the model's own copy       T1 < s <= T2: a low copy will do      T2 < s: left out

That is asked of what is missing only: a copy that is here serves as it is. The first expert is always important. In a
batch an expert is as important as it is to the token that it matters most to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from smoe.routing import Routing

_ROUNDING = 1e-6
"""The rounding error of sums of weights: a threshold of a whole share is met by it."""


class Thresholds(NamedTuple):
    """Bounds of unimportance, 0 <= `low` <= `skip` <= 1; at 1 no expert is beyond."""

    low: float = 1.0
    """T1: above it a low copy will do."""
    skip: float = 1.0
    """T2: above it an expert is left out."""


ALL_IMPORTANT = Thresholds()


def unimportance(weights: Sequence[float]) -> list[float]:
    """The unimportance of one token's choices, in their order: the sum of the weights that are larger; of equal ones
    the first is.

    `weights` [K] are scaled to sum 1.
    """
    order = sorted(range(len(weights)), key=lambda k: -weights[k])
    found = [0.0] * len(weights)
    for place, before in zip(order, accumulate((weights[k] for k in order), initial=0.0), strict=False):
        found[place] = before
    return found


def least_unimportance(routing: Routing) -> dict[int, float]:
    """The unimportance of every expert that a step uses, to the token that it matters most to.

    `routing.weights` must be there.
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
    """The routing with what a low copy will do for, and which experts are not worth a load at all."""
    least = least_unimportance(routing)
    low = frozenset(expert for expert, value in least.items() if value > thresholds.low + _ROUNDING)
    skip = frozenset(expert for expert in low if least[expert] > thresholds.skip + _ROUNDING)
    return routing._replace(low=low), skip


def without(routing: Routing, gone: frozenset[int]) -> Routing:
    """The routing without some experts: their routes get the index E, "no expert"."""
    none = routing.experts
    return routing._replace(
        top_k_index=[[none if expert in gone else expert for expert in row] for row in routing.top_k_index]
    )


def scaled(weights: Sequence[Sequence[float]]) -> list[list[float]]:
    """Every row with the sum 1; rows of zeros stay."""
    sums = [sum(row) or 1.0 for row in weights]
    return [[weight / total for weight in row] for row, total in zip(weights, sums, strict=True)]
