"""Measures the computing time of each layer in a process's first pass, in which the first layer pays for everything
made once."""

from __future__ import annotations

import statistics

from smoe.policy.step import Decision
from smoe.routing import Phase, Routing
from smoe.runtime.engine import Engine
from smoe.runtime.observer import StepObserver

_LEAST_LAYERS = 3


class PromptLayers(StepObserver):
    """Observes an engine's first pass, which reads a prompt or its first piece."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._computed: list[float] = []
        """Seconds of computing until the plan of each layer."""
        self._is_over = engine.stats().forward_passes > 0

    def planned(self, routing: Routing, decision: Decision) -> None:
        counters = self._engine.stats()
        self._is_over = self._is_over or counters.forward_passes > 0
        if not self._is_over and routing.phase is Phase.PREFILL:
            self._computed.append(self._engine.now() - counters.elsewhere_seconds - counters.plan_seconds)

    @property
    def warm_seconds(self) -> float | None:
        """The computing seconds of the pass if every layer took the median time; None for too few layers."""
        layers = [after - before for before, after in zip(self._computed, self._computed[1:], strict=False)]
        return statistics.median(layers) * len(self._computed) if len(layers) >= _LEAST_LAYERS else None
