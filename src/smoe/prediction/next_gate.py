"""Predicts the next layer's experts by applying its router to this layer's router input.

    router input of layer l ---> router of layer l+1 ---> prediction for layer l+1

The router input of a layer changes little from layer to layer, so the router of a layer can be applied to the router
input of the layer before.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

from smoe.models.outline import ExpertsSite
from smoe.models.scoring import ScoringRule, in_order
from smoe.policy.importance import ALL_IMPORTANT, graded, scaled
from smoe.policy.prediction import Grading, Prediction, Predictor, Sight
from smoe.prediction.without_hooks import without_hooks
from smoe.routing import Phase, Routing


class NextGate(Predictor):
    """Predicts the next layer's experts by applying its router to this layer's router input.

    This is the simplest predictor that needs no training (Mixtral-Offloading, arXiv 2312.17238, section 3.2).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: list[ExpertsSite],
        gates: Mapping[int, str],
        rules: Mapping[int, ScoringRule],
        what: str,
    ) -> None:
        modules = dict(model.named_modules())
        self._following = dict(itertools.pairwise(site.layer for site in sites))
        self._experts = {site.layer: site.experts for site in sites}
        self._routers = {layer: modules[name] for layer, name in gates.items()}
        self._parts = {layer: list(router.modules()) for layer, router in self._routers.items()}
        self._rules = rules
        self._what = what

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        return self.predict_by(self.grading, sight)

    def predict_by(self, grading: Grading, sight: Sight) -> Sequence[Prediction]:
        """Return the predictions for one layer by these thresholds."""
        after, hidden = self._following.get(sight.layer), sight.hidden
        if after is None or _has_any_global_hook():
            return ()
        router, experts = self._routers.get(after), self._experts[after]
        if router is None:  # a long prompt uses nearly every expert
            return (Prediction(after, range(experts)),) if hidden.shape[0] >= experts else ()
        with without_hooks(self._parts[after]):
            output = router(hidden)
        return (self.named(after, output, grading, sight.rows),)

    def named(
        self, layer: int, output: tuple[Any, ...], grading: Grading, rows: Sequence[int] | None = None
    ) -> Prediction:
        """Return the experts of a layer that are worth a load, best first, computed from its router's `output`. `rows`:
        the rows to consider; None: all.

        Experts are ordered by their highest weight, or score, in any row; among equal experts the lowest number comes
        first. Without substitution, all chosen experts are returned. With substitution, the second version of SMoE
        returns only experts predicted to be top-score, and the first version all chosen ones. If missing experts may be
        loaded as low-precision copies, the predicted importance decides between full copy, low-precision copy and no
        load (HOBBIT, section 3.3).
        """
        if rows is not None:
            output = tuple(value[list(rows)] if isinstance(value, torch.Tensor) else value for value in output)
        index = _chosen(output)
        weights = _weights(output, index)
        is_selective = grading.alpha > 0 and self._what == "top-score"
        if is_selective and index.shape[1] < self._experts[layer]:
            best = _top_score(self._rules[layer], in_order(output)[0], index, grading.alpha)
        else:
            best = _best_first(index, weights)
        if grading.thresholds == ALL_IMPORTANT or not weights.is_floating_point():
            return Prediction(layer, best)
        routing = Routing(layer, Phase.DECODE, self._experts[layer], index.tolist(), weights=scaled(weights.tolist()))
        graded_routing, skip = graded(routing, grading.thresholds)
        return Prediction(layer, [expert for expert in best if expert not in skip], graded_routing.low)


def _top_score(rule: ScoringRule, logits: torch.Tensor, index: torch.Tensor, alpha: float) -> list[int]:
    """Return the experts that are top-score for any token, highest score first."""
    choice = rule.choice(rule.scores(logits))
    bound = choice.topk(index.shape[1] + 1, dim=-1).values[:, -1:]
    scores = choice.gather(-1, index)
    is_above = scores >= (1 + alpha) * bound
    return _best_first(index[is_above], scores[is_above])


def _best_first(index: torch.Tensor, scores: torch.Tensor) -> list[int]:
    """Return the experts in `index`, ordered by their highest value in `scores` (of the same shape); of equals the
    lowest number first."""
    best: dict[int, float] = {}
    for expert, score in zip(index.reshape(-1).tolist(), scores.reshape(-1).tolist(), strict=True):
        best[expert] = max(score, best.get(expert, score))
    return sorted(best, key=lambda expert: (-best[expert], expert))


def _weights(output: Sequence[Any], index: torch.Tensor) -> torch.Tensor:
    """Return the routing weights [T, K] from a router's output. If the output has no weights, return numbers that
    decrease from the first choice to the last."""
    found = [x for x in output if isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape == index.shape]
    return found[-1] if found else torch.arange(0, -index.shape[1], -1).expand_as(index)


def _chosen(output: Sequence[Any]) -> torch.Tensor:
    """Return the indices [T, K] of the chosen experts from a router's output: its last integer tensor."""
    return next(x for x in reversed(output) if isinstance(x, torch.Tensor) and not x.is_floating_point())
