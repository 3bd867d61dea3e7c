"""Predictors for traces: one that knows, for what any prefetch could bring at best, or at a given recall and depth; and
one that repeats what another has said."""

from __future__ import annotations

import random
from collections.abc import Sequence

from smoe.policy.importance import ALL_IMPORTANT, graded
from smoe.policy.prediction import Moment, Prediction, Predictor, Sight
from smoe.policy.substitution import substitute
from smoe.routing import Phase, Routing


class Recorded(Predictor):
    """Says again what a predictor has said at each routing of a trace, as it was recorded."""

    def __init__(self, said: Sequence[Sequence[Prediction]], asked: Moment = Moment.ROUTED) -> None:
        """`said`: for each routing of the trace, the answer, or nothing."""
        self.asked = asked
        self._said = said
        self._heard = 0

    def observe(self, routing: Routing) -> None:
        self._heard += 1

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        return self._said[self._heard - 1]


class Foresight(Predictor):
    """Says what the next `depth` layers of a trace will choose. Hears the trace from its beginning, step by step.

    With a `recall` below 1 every expert is named with that probability, and another one in its place else. With
    `thresholds` below 1 it knows importance, too: the trace must then have weights; with an `alpha` above 0 it names
    top-score experts alone: the trace must then have scores.
    """

    def __init__(
        self,
        trace: Sequence[Routing],
        recall: float = 1.0,
        asked: Moment = Moment.ROUTED,
        seed: int = 0,
        depth: int = 1,
    ) -> None:
        assert 0.0 <= recall <= 1.0 and depth >= 1, (recall, depth)
        self.asked = asked
        self._trace = trace
        self._recall = recall
        self._depth = depth
        self._chance = random.Random(seed)
        self._next = 0

    def observe(self, routing: Routing) -> None:
        assert self._trace[self._next] is routing or self._trace[self._next] == routing, "another trace"
        self._next += 1

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        """What comes, layer by layer, up to the end of the step."""
        layer, found = sight.layer, []
        for number in range(self._next, min(self._next + self._depth, len(self._trace))):
            coming = self._trace[number]
            if coming.phase is not Phase.DECODE or coming.layer <= layer:
                break
            found.append(self._named(coming))
            layer = coming.layer
        return found

    def _named(self, coming: Routing) -> Prediction:
        experts = sorted({expert for row in coming.top_k_index for expert in row} - {coming.experts})
        others = sorted(set(range(coming.experts)) - set(experts))
        if self.alpha > 0:  # who is substituted when missing is not worth a load
            everybody = range(coming.experts)
            top = substitute(coming, everybody, self.alpha, share=False, drop=False, under_way=()).top
            experts = [expert for expert in experts if expert in top]
        low, skip = frozenset[int](), frozenset[int]()
        if self.thresholds != ALL_IMPORTANT:
            routing, skip = graded(coming, self.thresholds)
            low = frozenset(routing.low)
        named: dict[int, bool] = {}
        for expert in experts:
            is_right = self._chance.random() < self._recall or not others
            guess = expert if is_right else self._chance.choice(others)
            if expert not in skip:
                named.setdefault(guess, expert in low)
        return Prediction(coming.layer, list(named), frozenset(expert for expert, is_low in named.items() if is_low))
