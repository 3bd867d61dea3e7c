"""Measures the computing time of each layer in the first pass of a process. The first layer takes longer, because
buffers and kernels are made in it."""

from __future__ import annotations

import statistics

from smoe.policy.step import Decision
from smoe.routing import Phase, Routing
from smoe.runtime.engine import Engine
from smoe.runtime.observer import StepObserver

_LEAST_LAYERS = 3


class PromptLayers(StepObserver):
    """Observes the first pass of an engine, which computes a prompt or its first chunk."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._computed: list[float] = []
        """Seconds of computing in the pass so far, at the time when each layer is planned."""
        self._is_over = engine.stats().forward_passes > 0

    def planned(self, routing: Routing, decision: Decision) -> None:
        counters = self._engine.stats()
        self._is_over = self._is_over or counters.forward_passes > 0
        if not self._is_over and routing.phase is Phase.PREFILL:
            self._computed.append(self._engine.now() - counters.elsewhere_seconds - counters.plan_seconds)

    @property
    def is_of_first_pass(self) -> bool:
        """Whether the engine's first pass has been observed."""
        return bool(self._computed)

    @property
    def warm_seconds(self) -> float | None:
        """The seconds that the pass would have taken for computing if every layer took the median time. None for too
        few layers."""
        layers = [after - before for before, after in zip(self._computed, self._computed[1:], strict=False)]
        return statistics.median(layers) * len(self._computed) if len(layers) >= _LEAST_LAYERS else None
