"""Callbacks for each step of a layer, used by traces, measurements and comparisons.

In order of time, the work of a layer and the callbacks in parentheses:

    router | (routed) | substitutes and plan | (planned) | loads, experts, sum | (computed)
"""

from __future__ import annotations

import torch

from smoe.policy.step import Decision
from smoe.routing import Routing
from smoe.runtime.step import Step


class StepObserver:
    """The base class of observers of a layer's steps. The methods do nothing; override those that you need. An
    exception in one of them ends the forward pass."""

    def routed(self, step: Step) -> None:
        """Called when a layer's router has chosen experts, before any expert is replaced or computed."""

    def planned(self, routing: Routing, decision: Decision) -> None:
        """Called with the router's choice of experts and the decision how to compute them."""

    def computed(self, step: Step, output: torch.Tensor) -> None:
        """Called with the output [T, H] of a layer's experts, after all of them have been computed."""


class RoutingList(StepObserver):
    """Stores the routing of every step in `trace`, a list that `smoe.simulator` can replay."""

    def __init__(self) -> None:
        self.trace: list[Routing] = []

    def planned(self, routing: Routing, decision: Decision) -> None:
        self.trace.append(routing)
