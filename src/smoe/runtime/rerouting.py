"""Substitution between planner and tensors: scores come in as lists, substitutes go back with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from smoe.config import EngineConfig
from smoe.policy.importance import Thresholds
from smoe.policy.step import Decision, Switches


class Substitution(NamedTuple):
    """How experts are replaced: what is decided, and what a substitute weighs."""

    switches: Switches = Switches()
    inherits_weight: bool = False
    """A substitute weighs what the expert that it replaces would have; else its own score by the router's rule."""
    gaps_keep_weight: bool = False
    """Where a route is left out the others weigh what they would with it; else they share its weight by the rule."""


EXACTLY = Substitution()
"""Nothing is replaced."""


def substitution_of(config: EngineConfig) -> Substitution:
    """What a configuration asks for."""
    switches = Switches(
        alpha=config.alpha,
        drop=config.substitutes == "drop",
        share=config.share_substitutes,
        prefill_keep=config.prefill_keep,
        thresholds=Thresholds(config.low_threshold if config.has_low else config.skip_threshold, config.skip_threshold),
        low_use="meanwhile" if config.low_meanwhile else "asked",
    )
    return Substitution(switches, config.substitute_weights == "inherited", config.prices_answers)


class Scored(NamedTuple):
    """What a layer's router said about all experts."""

    rule: Rule
    scores: torch.Tensor
    """[T, E]"""

    def choice_of(self, tokens: Sequence[int] | None) -> torch.Tensor:
        """Choice scores of these tokens, or of all: [tokens, E]."""
        return self.rule.choice(self.scores if tokens is None else self.scores[list(tokens)])


class Rule(Protocol):
    """How scores become a choice and weights (`models/scoring.py`)."""

    def choice(self, scores: torch.Tensor) -> torch.Tensor: ...

    def weights(self, scores: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    @property
    def ranks_by_scores(self) -> bool: ...

    def weights_of(self, chosen: Sequence[float]) -> list[float]: ...


def with_substitutes(
    decision: Decision, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, scored: Scored, asked: Substitution
) -> tuple[torch.Tensor, torch.Tensor]:
    """top_k_index and top_k_weights [T, K] with the substitutes in them; tokens without one keep their weights to the
    last bit."""
    assert decision.selection is not None
    index = torch.tensor(decision.routing.top_k_index, device=top_k_index.device, dtype=top_k_index.dtype)
    if asked.inherits_weight:
        return index, top_k_weights
    replacements = decision.selection.replacements
    weighed = [list(row) for row in decision.routing.top_k_index]
    if asked.gaps_keep_weight:
        for token, choice, active, expert in replacements:
            weighed[token][choice] = active if expert is None else expert
        replacements = [replacement for replacement in replacements if replacement.substitute is not None]
    if not replacements:
        return index, top_k_weights
    if len(index) == 1 and scored.rule.ranks_by_scores:  # the usual step: one tensor instead of eight
        assert decision.routing.scores is not None
        scores, none = decision.routing.scores[0], decision.routing.experts
        chosen = [0.0 if expert == none else scores[expert] for expert in weighed[0]]
        return index, top_k_weights.new_tensor([scored.rule.weights_of(chosen)])
    touched = sorted({replacement.token for replacement in replacements})
    top_k_weights = top_k_weights.clone()
    by_rule = torch.tensor([weighed[token] for token in touched], device=index.device, dtype=index.dtype)
    top_k_weights[touched] = scored.rule.weights(scored.scores[touched], by_rule, top_k_weights.dtype)
    return index, top_k_weights
