"""Substitution between planner and tensors: scores come in as lists, substitutes go back with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from smoe.config import EngineConfig
from smoe.policy.selection import Selection, applied
from smoe.routing import Routing


class Substitution(NamedTuple):
    """The lossy switches of `EngineConfig`, together."""

    alpha: float
    drop: bool
    inherits_weight: bool
    share: bool


def substitution_of(config: EngineConfig) -> Substitution | None:
    """What a configuration asks for; None where nothing may be replaced."""
    if config.alpha == 0:
        return None
    return Substitution(
        alpha=config.alpha,
        drop=config.substitutes == "drop",
        inherits_weight=config.substitute_weights == "inherited",
        share=config.share_substitutes,
    )


class Scored(NamedTuple):
    """What a layer's router said about all experts."""

    rule: Rule
    scores: torch.Tensor
    """[T, E]"""

    def choice_of(self, tokens: Sequence[int] | None) -> list[list[float]]:
        """Choice scores of these tokens, or of all."""
        scores = self.scores if tokens is None else self.scores[list(tokens)]
        rows: list[list[float]] = self.rule.choice(scores).tolist()
        return rows


class Rule(Protocol):
    """How scores become a choice and weights (`models/scoring.py`)."""

    def choice(self, scores: torch.Tensor) -> torch.Tensor: ...

    def weights(self, scores: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


def with_substitutes(
    selection: Selection,
    routing: Routing,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    scored: Scored,
    asked: Substitution,
) -> tuple[Routing, torch.Tensor, torch.Tensor]:
    """Routes with the substitutes in them; tokens without one keep their weights to the last bit."""
    routing = applied(selection, routing)
    index = torch.tensor(routing.top_k_index, device=top_k_index.device, dtype=top_k_index.dtype)
    if not asked.inherits_weight:
        touched = sorted({replacement.token for replacement in selection.replacements})
        top_k_weights = top_k_weights.clone()
        top_k_weights[touched] = scored.rule.weights(scored.scores[touched], index[touched], top_k_weights.dtype)
    return routing, index, top_k_weights
