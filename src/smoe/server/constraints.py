"""Constraints on the next token of a request's texts."""

from __future__ import annotations

from typing import Protocol

import torch

from smoe.generation.request import Constraint


class Copied(Constraint, Protocol):
    """The interface of a constraint on the next token that is copied for each text."""

    def another(self) -> Copied:
        """Return a copy for another text that has the same prompt."""


class Both:
    """Two constraints on one text. Where they exclude each other, the first applies."""

    def __init__(self, first: Copied, second: Copied) -> None:
        self._first, self._second = first, second

    def another(self) -> Both:
        """Return a copy for another text that has the same prompt."""
        return Both(self._first.another(), self._second.another())

    def narrow(self, logits: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to minus infinity. `logits`: [V]."""
        self._first.narrow(logits)
        narrower = logits.clone()
        self._second.narrow(narrower)
        narrower.masked_fill_(logits == -torch.inf, -torch.inf)  # the second may have raised them
        if (narrower > -torch.inf).any():
            logits.copy_(narrower)

    def take(self, token: int) -> None:
        """Record the chosen token."""
        self._first.take(token)
        self._second.take(token)
