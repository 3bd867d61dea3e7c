"""Callbacks for each step of a layer, used by traces, measurements and comparisons.

router | routed | substitutes and plan | planned | loads, experts, sum | computed
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from smoe.policy.step import Decision
from smoe.routing import Phase, Routing


class Routed(NamedTuple):
    """What a router has said about T rows of `sequences` sequences of equal length, one after the other."""

    layer: int
    phase: Phase
    sequences: int
    logits: torch.Tensor | None
    """[T, E]; None where nobody listens to the router."""
    top_k_index: torch.Tensor
    """[T, K], with the index E at padding."""
    top_k_weights: torch.Tensor
    """[T, K]"""


class StepObserver:
    """Override what you need; the defaults do nothing. An exception ends the forward pass."""

    def routed(self, heard: Routed) -> None:
        """A layer's experts are about to be served; nothing has been replaced yet."""

    def planned(self, routing: Routing, decision: Decision) -> None:
        """What was chosen, and what is going to be done about it."""

    def computed(self, heard: Routed, hidden: torch.Tensor, output: torch.Tensor) -> None:
        """A layer's experts have given `output` [T, H] for `hidden` [T, H]."""


class RoutingList(StepObserver):
    """Keeps every routing: input for `smoe.simulator`."""

    def __init__(self) -> None:
        self.trace: list[Routing] = []

    def planned(self, routing: Routing, decision: Decision) -> None:
        self.trace.append(routing)
