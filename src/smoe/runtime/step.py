"""One layer of one forward pass, as its router leaves it: what everything after the router works on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from smoe.routing import Phase
from smoe.runtime.rerouting import Scored


class Step(NamedTuple):
    """T rows of `sequences` sequences of equal length, one sequence after the other."""

    layer: int
    phase: Phase
    hidden: torch.Tensor
    """[T, H]"""
    top_k_index: torch.Tensor
    """[T, K], with the index E at padding."""
    top_k_weights: torch.Tensor
    """[T, K]"""
    sequences: int = 1
    logits: torch.Tensor | None = None
    """[T, E]; None where no policy reads the router."""
    scored: Scored | None = None
    """The router's scores; None where no policy reads them."""
