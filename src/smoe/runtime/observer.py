"""Callbacks for each step of a layer, used by traces, measurements and comparisons.

router | routed | substitutes and plan | planned | loads, experts, sum | computed
"""

from __future__ import annotations

import torch

from smoe.policy.step import Decision
from smoe.routing import Routing
from smoe.runtime.step import Step


class StepObserver:
    """The base of observers: override the methods you need; the defaults do nothing. An exception ends the forward
    pass."""

    def routed(self, step: Step) -> None:
        """Called before a layer's experts are computed, and before any replacement."""

    def planned(self, routing: Routing, decision: Decision) -> None:
        """Called with the router's choice and the decision about it."""

    def computed(self, step: Step, output: torch.Tensor) -> None:
        """Called with the experts' output [T, H] of a layer."""


class RoutingList(StepObserver):
    """Stores every routing: input for `smoe.simulator`."""

    def __init__(self) -> None:
        self.trace: list[Routing] = []

    def planned(self, routing: Routing, decision: Decision) -> None:
        self.trace.append(routing)
