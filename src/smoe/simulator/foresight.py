"""A predictor that knows: what any prefetch could bring at best, or at a given recall."""

from __future__ import annotations

import random
from collections.abc import Sequence

from smoe.policy.prediction import Moment, Prediction, Predictor, Sight
from smoe.routing import Phase, Routing


class Foresight(Predictor):
    """Says what the next layer of a trace will choose. Hears the trace from its beginning, step by step.

    With a `recall` below 1 every expert is named with that probability, and another one in its place else.
    """

    def __init__(self, trace: Sequence[Routing], recall: float = 1.0, asked: Moment = Moment.ROUTED, seed: int = 0):
        assert 0.0 <= recall <= 1.0, recall
        self.asked = asked
        self._trace = trace
        self._recall = recall
        self._chance = random.Random(seed)
        self._next = 0

    def observe(self, routing: Routing) -> None:
        assert self._trace[self._next] is routing or self._trace[self._next] == routing, "another trace"
        self._next += 1

    def predict(self, sight: Sight) -> Prediction | None:
        if self._next == len(self._trace):
            return None
        coming = self._trace[self._next]
        if coming.phase is not Phase.DECODE or coming.layer <= sight.layer:
            return None
        experts = sorted({expert for row in coming.top_k_index for expert in row} - {coming.experts})
        others = sorted(set(range(coming.experts)) - set(experts))
        named = [
            e if self._chance.random() < self._recall or not others else self._chance.choice(others) for e in experts
        ]
        return Prediction(coming.layer, list(dict.fromkeys(named)))
