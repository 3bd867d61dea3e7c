"""Predictors for replays of traces. `Foresight` knows the future, and predicts it with a given recall. `Recorded`
repeats predictions that were recorded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from smoe.policy.importance import ALL_IMPORTANT, graded
from smoe.policy.prediction import Moment, Prediction, Predictor, Sight
from smoe.policy.substitution import substitute
from smoe.routing import Phase, Routing


class Recorded(Predictor):
    """Returns the recorded predictions of another predictor, one list for each routing of a trace."""

    def __init__(self, recorded: Sequence[Sequence[Prediction]], asked: Moment = Moment.ROUTED) -> None:
        """`recorded`: the predictions at each routing of the trace. `asked`: the time within a layer at which the
        predictions are made."""
        self.asked = asked
        self._recorded = recorded
        self._observed = 0

    def observe(self, routing: Routing) -> None:
        self._observed += 1

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        return self._recorded[self._observed - 1]


class Foresight(Predictor):
    """Predicts the choices of the next `depth` layers of a trace. It must observe the trace from its beginning.

    With a `recall` below 1, each expert is predicted with this probability; otherwise another expert is predicted in
    its place. The other expert is drawn at random, or given by `guesses`: the predictions for each routing's number, as
    `blurred` returns them (this requires scores). By thresholds of importance below 1 it also predicts importance
    (requires weights). With an alpha above 0 it predicts only top-score experts (requires scores).
    """

    def __init__(
        self,
        trace: Sequence[Routing],
        recall: float = 1.0,
        asked: Moment = Moment.ROUTED,
        seed: int = 0,
        depth: int = 1,
        guesses: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        assert 0.0 <= recall <= 1.0 and depth >= 1, (recall, depth)
        self.asked = asked
        self._trace = trace
        self._recall = recall
        self._depth = depth
        self._chance = random.Random(seed)
        self._next = 0
        self._blurred = guesses if recall < 1 else None

    def observe(self, routing: Routing) -> None:
        assert self._trace[self._next] is routing or self._trace[self._next] == routing, "another trace"
        self._next += 1

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        """Return predictions for the next layers, at most up to the last layer of the step."""
        layer, found = sight.layer, []
        for number in range(self._next, min(self._next + self._depth, len(self._trace))):
            coming = self._trace[number]
            if coming.phase is not Phase.DECODE or coming.layer <= layer:
                break
            found.append(self._named(coming, number))
            layer = coming.layer
        return found

    def _named(self, coming: Routing, number: int) -> Prediction:
        needed = {expert for row in coming.top_k_index for expert in row} - {coming.experts}
        if self._blurred is not None and self.grading.is_exact:
            return Prediction(coming.layer, self._blurred[number][: len(needed)])
        experts = sorted(needed)
        alpha, thresholds = self.grading
        if alpha > 0:  # an expert that is substituted when missing is not worth a load
            everybody = range(coming.experts)
            top = substitute(coming, everybody, alpha, share=False, drop=False, under_way=()).top
            experts = [expert for expert in experts if expert in top]
        low, skip = frozenset[int](), frozenset[int]()
        if thresholds != ALL_IMPORTANT:
            routing, skip = graded(coming, thresholds)
            low = frozenset(routing.low)
        named: dict[int, bool] = {}
        for expert, guess in self._guesses(experts, coming, number):
            if expert not in skip:
                named.setdefault(guess, expert in low)
        return Prediction(coming.layer, list(named), frozenset(expert for expert, is_low in named.items() if is_low))

    def _guesses(self, experts: list[int], coming: Routing, number: int) -> Iterator[tuple[int, int]]:
        """Yield (a needed expert, the expert that is predicted in its place) for routing number `number`."""
        if self._blurred is not None:
            scores = coming.scores
            assert scores is not None, "asked for"
            yield from zip(sorted(experts, key=lambda expert: -scores[0][expert]), self._blurred[number], strict=False)
            return
        others = sorted(set(range(coming.experts)) - {expert for row in coming.top_k_index for expert in row})
        for expert in experts:
            is_right = self._chance.random() < self._recall or not others
            yield expert, expert if is_right else self._chance.choice(others)


_HALVINGS = 12


def blurred(trace: Sequence[Routing], recall: float, seed: int = 0) -> dict[int, list[int]]:
    """Return {number of a decode step's routing: K predicted experts}. The predictions are wrong in the way in which a
    router with noisy input is wrong: they are the top-k of the recorded logits with added noise. The amount of noise is
    chosen to give `recall`."""
    numbers = [number for number, routing in enumerate(trace) if routing.phase is Phase.DECODE]
    scores = [routing.scores for routing in map(trace.__getitem__, numbers) if routing.scores is not None]
    assert len(scores) == len(numbers), "a trace with scores"
    if not numbers:
        return {}
    logits = np.log(np.maximum(np.array([of_step[0] for of_step in scores]), np.finfo(float).tiny))  # [steps * L, E]
    chosen = np.array([trace[number].top_k_index[0] for number in numbers])
    is_chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(is_chosen, chosen, True, 1)
    noise = np.random.default_rng(seed).normal(size=logits.shape)

    def guessed(amount: float) -> np.ndarray:
        return np.argsort(-(logits + amount * noise), axis=1)[:, : chosen.shape[1]]

    low, high = 0.0, 8 * float(logits.std() + 1e-9)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_better = np.take_along_axis(is_chosen, guessed(middle), 1).mean() > recall
        low, high = (middle, high) if is_better else (low, middle)
    return dict(zip(numbers, guessed(high).tolist(), strict=True))
