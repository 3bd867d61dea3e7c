"""What computing a prompt's layers took, on a clock that the test moves.

Would catch: what a process makes once taken for the pace of every layer, time of reading counted as computing, a later
pass looked at.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smoe.metrics import Counters
from smoe.report.prompt_layers import PromptLayers
from smoe.routing import Phase, Routing


class Engine:
    """Passes of some layers, each of which takes so many seconds of computing and of waiting."""

    def __init__(self) -> None:
        self.time, self.counters = 100.0, Counters()

    def now(self) -> float:
        return self.time

    def stats(self) -> Counters:
        return self.counters.copy()

    def run(
        self, layers: PromptLayers, computing: list[float], waiting: float = 0.0, phase: Phase = Phase.PREFILL
    ) -> None:
        decision: Any = SimpleNamespace()
        for layer, seconds in enumerate(computing):
            layers.planned(Routing(layer, phase, 8, [[0]], None, 1), decision)
            self.time += seconds + waiting
            self.counters.wait_seconds += waiting
        self.counters.forward_passes += 1


def seen(engine: Any) -> PromptLayers:
    return PromptLayers(engine)


def test_the_first_layer_pays_for_what_is_made_once() -> None:
    engine = Engine()
    layers = seen(engine)
    engine.run(layers, [9.0, 0.1, 0.1, 0.3, 0.1, 0.1], waiting=2.0)
    assert layers.warm_seconds == pytest.approx(0.6)
    engine.run(layers, [5.0] * 6)
    engine.run(layers, [7.0] * 6, phase=Phase.DECODE)
    assert layers.warm_seconds == pytest.approx(0.6), "the first pass alone"


def test_too_few_layers_or_a_later_pass_show_nothing() -> None:
    engine = Engine()
    layers = seen(engine)
    engine.run(layers, [1.0] * 3)
    assert layers.warm_seconds is None
    later = seen(engine)
    engine.run(later, [1.0] * 9)
    assert later.warm_seconds is None
