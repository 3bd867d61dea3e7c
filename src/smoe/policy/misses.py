"""What a decode step misses in a layer: the experts, and for each of their routes who could take its place."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from math import inf
from typing import NamedTuple

from smoe.routing import Routing


class Route(NamedTuple):
    """One route of a missing expert."""

    token: int
    choice: int
    """Position among the token's K choices."""
    weight: float
    """Its part of the token's routing weights."""
    substitute: int | None = None
    """The resident expert that would serve instead; no other missing route of the token has the same."""
    gap: float = 0.0
    """The part of the expert's score that the substitute's falls short of it."""


class Missing(NamedTuple):
    """An expert that the layer wants and that is neither resident nor under way."""

    expert: int
    routes: Sequence[Route]
    low_is_here: bool = False
    """Its low copy is resident."""


def missing_experts(routing: Routing, at_hand: Container[int], low_here: Container[int] = ()) -> list[Missing]:
    """What is not `at_hand`, each route with its substitute; `routing` must have scores and weights.

    Substitutes are experts at hand that the token has not chosen, each for one route of the token, the one of the
    highest score for the route of the lowest weight, as this is given up first. Padding routes are left out.
    """
    assert routing.scores is not None and routing.weights is not None
    found: dict[int, list[Route]] = {}
    for token, (chosen, weights) in enumerate(zip(routing.top_k_index, routing.weights, strict=True)):
        lost = [k for k, expert in enumerate(chosen) if expert not in at_hand and expert != routing.experts]
        if not lost:
            continue
        scores = routing.scores[token]
        substitutes = _substitutes(scores, chosen, at_hand)
        for choice in sorted(lost, key=weights.__getitem__) if len(lost) > 1 else lost:
            expert = chosen[choice]
            instead = next(substitutes, None)
            gap = 0.0 if instead is None else _gap(scores[expert], scores[instead])
            found.setdefault(expert, []).append(Route(token, choice, weights[choice], instead, gap))
    return [Missing(expert, routes, expert in low_here) for expert, routes in found.items()]


def _substitutes(scores: Sequence[float], chosen: Sequence[int], at_hand: Container[int]) -> Iterator[int]:
    """Experts at hand that the token has not chosen, best first; ties by number."""
    for expert in sorted(range(len(scores)), key=scores.__getitem__, reverse=True):
        if scores[expert] == -inf:  # its group is left out
            return
        if expert not in chosen and expert in at_hand:
            yield expert


def _gap(score: float, of_substitute: float) -> float:
    """The part of a score that its substitute's falls short of it, 0 to 1."""
    return min(max((score - of_substitute) / score, 0.0), 1.0) if score > 0.0 else 1.0
