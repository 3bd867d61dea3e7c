"""One layer of one forward pass after its router has run: the input of planning and of computing the layer's
experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from smoe.routing import Phase
from smoe.runtime.rerouting import Scored


class Step(NamedTuple):
    """The input and routing of one layer in one pass. The T rows belong to `sequences` sequences of equal length, one
    sequence after the other."""

    layer: int
    phase: Phase
    hidden: torch.Tensor
    """[T, H], the router's input."""
    top_k_index: torch.Tensor
    """[T, K], with the index E at padding."""
    top_k_weights: torch.Tensor
    """[T, K], the routing weights."""
    sequences: int = 1
    logits: torch.Tensor | None = None
    """[T, E], the router's logits; None where no policy reads them."""
    scored: Scored | None = None
    """The router's scores; None where no policy reads them."""
