"""Callbacks for each step of a layer, used by traces, measurements and comparisons.

router | routed | substitutes and plan | planned | loads, experts, sum | computed
"""

from __future__ import annotations

import torch

from smoe.policy.step import Decision
from smoe.routing import Routing
from smoe.runtime.step import Step


class StepObserver:
    """Override what you need; the defaults do nothing. An exception ends the forward pass."""

    def routed(self, step: Step) -> None:
        """A layer's experts are about to be served; nothing has been replaced yet."""

    def planned(self, routing: Routing, decision: Decision) -> None:
        """What was chosen, and what is going to be done about it."""

    def computed(self, step: Step, output: torch.Tensor) -> None:
        """A layer's experts have given `output` [T, H]."""


class RoutingList(StepObserver):
    """Keeps every routing: input for `smoe.simulator`."""

    def __init__(self) -> None:
        self.trace: list[Routing] = []

    def planned(self, routing: Routing, decision: Decision) -> None:
        self.trace.append(routing)
