"""From a layer's guessed logits to the experts worth a load, by its router's own rule."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from smoe.models.scoring import ScoringRule
from smoe.policy.prediction import Prediction, Predictor
from smoe.prediction.next_gate import NextGate


class Ranking:
    """Turns logits into choices as the routers do. Used by the computing thread only."""

    def __init__(self, rules: Mapping[int, ScoringRule], top_k: Mapping[int, int], next_gate: NextGate) -> None:
        """`rules` and `top_k` of every layer that is guessed; `next_gate` says which of the chosen are worth a load."""
        self._rules = rules
        self._top_k = top_k
        self._next_gate = next_gate

    def serve_with(self, predictor: Predictor) -> None:
        """From now on choose among missing experts as `predictor` does, for the way layers are served."""
        self._next_gate.alpha, self._next_gate.thresholds = predictor.alpha, predictor.thresholds

    def named(self, layer: int, logits: torch.Tensor) -> Prediction:
        """The experts worth a load by these logits [T, E], as if the layer's own router had answered."""
        rule = self._rules[layer]
        scores = rule.scores(logits)
        index = rule.choice(scores).topk(self._top_k[layer], dim=-1).indices
        if len(logits) == 1 and self._next_gate.is_exact:  # of one row only the order counts, and weights take as long
            weights = scores.gather(-1, index)  # as all the rest
        else:
            weights = rule.weights(scores, index, scores.dtype)
        return self._next_gate.named(layer, (logits, weights, index))

    def margins(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        """`margins` of this layer's choice."""
        return margins(self._rules[layer], self._top_k[layer], logits)


_FAR = 1e4
"""A margin beyond doubt: that of an expert whose group is left out, too."""


def margins(rule: ScoringRule, top_k: int, logits: torch.Tensor) -> torch.Tensor:
    """[T, E], fp32: how far inside the choice an expert is, or outside where it is negative.

    In logits, from the middle between the last that is chosen and the first that is not; in what is ranked, where a
    rule does not rank by its scores.
    """
    ranked = logits.float() if rule.ranks_by_scores else rule.choice(rule.scores(logits)).clamp(-_FAR, _FAR)
    best = ranked.topk(min(top_k + 1, ranked.shape[-1]), dim=-1).values
    return ranked - best[:, top_k - 1 :].mean(dim=-1, keepdim=True)
