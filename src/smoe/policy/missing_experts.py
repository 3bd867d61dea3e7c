"""Finds the missing experts of one layer of a decode step, and a possible substitute for each of their routes."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from math import inf
from typing import NamedTuple

from smoe.routing import Routing


class Route(NamedTuple):
    """One (token, choice) pair whose expert is missing, and a possible substitute."""

    token: int
    choice: int
    """The index among the token's K choices."""
    weight: float
    """The fraction of the token's routing weight that this choice has."""
    substitute: int | None = None
    """A resident expert that could replace the missing one; None if there is none. No other route of the token has the
    same substitute."""
    gap: float = 0.0
    """How much lower the substitute's score is, as a fraction of the missing expert's score (0 to 1)."""


class Missing(NamedTuple):
    """An expert that the layer needs and that is neither resident nor in flight, with its routes."""

    expert: int
    routes: Sequence[Route]
    low_is_here: bool = False
    """Whether the expert's low-precision copy is resident."""


def missing_experts(routing: Routing, at_hand: Container[int], low_here: Container[int] = ()) -> list[Missing]:
    """Return the chosen experts that are not `at_hand` (neither in memory nor in flight), each route with a possible
    substitute. `low_here`: the experts whose low-precision copies are resident. `routing` must have scores and weights.

    Substitutes are experts at hand that the token has not chosen. Each is proposed for one route of the token. The
    substitute of highest score is proposed for the route of lowest weight, because that route is replaced first.
    Padding is left out.
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
    """Yield the experts of `at_hand` that the token has not chosen, highest score first; of equal scores the lower
    expert number first."""
    for expert in sorted(range(len(scores)), key=scores.__getitem__, reverse=True):
        if scores[expert] == -inf:  # masked by the router, as are all experts after it
            return
        if expert not in chosen and expert in at_hand:
            yield expert


def _gap(score: float, of_substitute: float) -> float:
    """Return how much lower the substitute's score is than `score`, as a fraction of `score` (0 to 1)."""
    return min(max((score - of_substitute) / score, 0.0), 1.0) if score > 0.0 else 1.0
