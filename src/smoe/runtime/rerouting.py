"""Routing weights after substitution: passes router scores to the planner, and computes the weights of substitutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from smoe.policy.step import Decision
from smoe.runtime.substitution import Substitution


class Scored(NamedTuple):
    """The scores of a layer's router for all experts, and the rule that turns scores into chosen experts and routing
    weights."""

    rule: Rule
    scores: torch.Tensor
    """[T, E]"""

    def choice_of(self, tokens: Sequence[int] | None) -> torch.Tensor:
        """Return the scores by which experts are chosen, [tokens, E]. `tokens`: the indices of the tokens; None: all
        tokens."""
        return self.rule.choice(self.scores if tokens is None else self.scores[list(tokens)])


class Rule(Protocol):
    """The rule of a router: from scores to chosen experts and their weights (`models/scoring.py`)."""

    def choice(self, scores: torch.Tensor) -> torch.Tensor: ...

    def weights(self, scores: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    @property
    def ranks_by_scores(self) -> bool: ...

    def weights_of(self, chosen: Sequence[float]) -> list[float]: ...


def weights_with_substitutes(
    decision: Decision, top_k_weights: torch.Tensor, scored: Scored, asked: Substitution
) -> torch.Tensor:
    """Return the routing weights [T, K] after substitution. The weights of tokens without a substitute do not change in
    any bit."""
    assert decision.selection is not None
    if asked.inherits_weight:
        return top_k_weights
    replacements = decision.selection.replacements
    weighed = [list(row) for row in decision.routing.top_k_index]
    if asked.gaps_keep_weight:
        for token, choice, active, expert in replacements:
            weighed[token][choice] = active if expert is None else expert
        replacements = [replacement for replacement in replacements if replacement.substitute is not None]
    if not replacements:
        return top_k_weights
    if len(weighed) == 1 and scored.rule.ranks_by_scores:  # the usual step needs one tensor instead of eight
        assert decision.routing.scores is not None
        scores, none = decision.routing.scores[0], decision.routing.experts
        chosen = [0.0 if expert == none else scores[expert] for expert in weighed[0]]
        return top_k_weights.new_tensor([scored.rule.weights_of(chosen)])
    touched = sorted({replacement.token for replacement in replacements})
    top_k_weights = top_k_weights.clone()
    by_rule = torch.tensor([weighed[token] for token in touched], device=top_k_weights.device)
    top_k_weights[touched] = scored.rule.weights(scored.scores[touched], by_rule, top_k_weights.dtype)
    return top_k_weights
