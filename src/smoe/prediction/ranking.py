"""Converts predicted router logits to the experts that are worth a load, by the router's own scoring rule."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from smoe.models.scoring import ScoringRule
from smoe.policy.prediction import Grading, Prediction
from smoe.prediction.next_gate import NextGate


class Ranking:
    """Converts predicted router logits to chosen experts, by the scoring rules of the model's routers. Only the
    computing thread may use it."""

    def __init__(self, rules: Mapping[int, ScoringRule], top_k: Mapping[int, int], next_gate: NextGate) -> None:
        """`rules` and `top_k`: {predicted layer: scoring rule} and {predicted layer: K}. `next_gate`: the predictor
        that decides which of the chosen experts are worth a load."""
        self._rules = rules
        self._top_k = top_k
        self._next_gate = next_gate

    def named(self, layer: int, logits: torch.Tensor, grading: Grading) -> Prediction:
        """Return the experts that are worth a load by these thresholds, as if the router of `layer` had computed these
        logits [T, E]."""
        rule = self._rules[layer]
        scores = rule.scores(logits)
        index = rule.choice(scores).topk(self._top_k[layer], dim=-1).indices
        if len(logits) == 1 and grading.is_exact:  # for one row only the order matters; computing weights
            weights = scores.gather(-1, index)  # would double the time
        else:
            weights = rule.weights(scores, index, scores.dtype)
        return self._next_gate.named(layer, (logits, weights, index), grading)

    def margins(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        """Return [T, E]: how far each expert is from the border between chosen and not chosen, for these logits [T, E]
        and the scoring rule of `layer`."""
        return margins(self._rules[layer], self._top_k[layer], logits)


_FAR = 1e4
"""The largest margin that is returned. Experts whose group is masked would have an infinite one."""


def margins(rule: ScoringRule, top_k: int, logits: torch.Tensor) -> torch.Tensor:
    """Return [T, E] in fp32: how far each expert is from the border between chosen and not chosen; positive for chosen
    experts.

    The border is the middle between the last chosen expert and the first that is not chosen. Margins are differences of
    logits. For a rule that does not rank by its scores, they are differences of the values that the rule ranks.
    """
    ranked = logits.float() if rule.ranks_by_scores else rule.choice(rule.scores(logits)).clamp(-_FAR, _FAR)
    best = ranked.topk(min(top_k + 1, ranked.shape[-1]), dim=-1).values
    return ranked - best[:, top_k - 1 :].mean(dim=-1, keepdim=True)
