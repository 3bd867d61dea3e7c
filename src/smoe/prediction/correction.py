"""The learned correction of a router: one matrix product that predicts a later layer's router logits.

    router input of layer l, this token  [T, H] --+
                                                  |-- weight [E, 2 H], bias [E] --> logits of layer l + d
    router input of l + d, token before  [T, H] --+

A router's logits are linear in its input. A linear prediction of that input can therefore be multiplied into the
router's matrix, and costs no more than one product. The second input is known when a token reaches layer l. It helps
because attention makes the inputs of neighbouring tokens similar. `smoe tune --predictor corrected-gates` learns the
weights by ridge regression, in closed form, with the router itself as the prior. In directions that the text does not
determine, the weights stay those of the router. Without any training, the predictions are those of the stacked gates.

The probability that an expert is needed is a logistic function of its margin (`ranking.margins`), which says how far
the expert is from not being chosen. The function is fitted on data that the regression has not used, separately for
each layer and distance d, because the same margin means less at a greater distance.

Letters: T tokens, H hidden size, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from smoe.models.router_matrix import RouterMatrix

SHRINKAGE = 0.05
"""The weight of the prior, relative to the mean variance of the inputs. A fiftieth of it costs 8 points of recall on
unseen text after 500 tokens of training text, and nothing after 8000 (docs/log/prefetch.md)."""
_NEWTON_STEPS = 40
_LARGEST_STEP = 5.0


class Correction(NamedTuple):
    """Predicts a later layer's router logits from this layer's router input, and the probability that an expert is
    needed."""

    weight: torch.Tensor
    """[E, 2 H] weights."""
    bias: torch.Tensor
    """[E] bias."""
    first_bias: torch.Tensor
    """[E] bias for a token whose predecessor is unknown. It contains the mean effect of the predecessor."""
    slope: float
    """The change of the log odds that an expert is needed, for each unit of margin."""
    offset: float
    """The log odds that an expert on the border between chosen and not chosen (margin 0) is needed."""

    def logits(self, hidden: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Return [T, E], the predicted logits, for the router input `hidden` [T, H] of this layer. `before`: [T, H],
        the later layer's router input for the token before each token; None if it is unknown."""
        if before is None:
            return functional.linear(hidden, self.weight[:, : hidden.shape[-1]], self.first_bias)
        return functional.linear(torch.cat([hidden, before], dim=-1), self.weight, self.bias)

    def probabilities(self, margins: torch.Tensor) -> torch.Tensor:
        """Return the probability that an expert is needed, for each of the `margins` (how far an expert is from not
        being chosen), in the same shape."""
        return (margins * self.slope + self.offset).sigmoid()

    def to(self, device: torch.device, dtype: torch.dtype) -> Correction:
        """Return the same correction on another device and in another data type."""
        weight, bias, first_bias = (value.to(device, dtype) for value in self[:3])
        return Correction(weight, bias, first_bias, self.slope, self.offset)


def uncorrected(matrix: RouterMatrix) -> Correction:
    """Return a `Correction` that consists of the unchanged router; every chosen expert counts as needed."""
    weight = torch.cat([matrix.weight, torch.zeros_like(matrix.weight)], dim=-1)
    bias = weight.new_zeros(len(weight)) if matrix.bias is None else matrix.bias.to(weight.dtype, copy=True)
    return Correction(weight, bias, bias.clone(), 0.0, 30.0)


def fitted(
    hidden: torch.Tensor, before: torch.Tensor, has_before: torch.Tensor, logits: torch.Tensor, router: torch.Tensor
) -> Correction:
    """Return the correction that predicts `logits` [T, E] best by least squares, in fp32. Its probabilities are not
    fitted.

    `hidden` and `before` [T, H]: as for `Correction.logits`. `has_before` [T]: whether the token before is known.
    `router` [E, H]: the later layer's own matrix, towards which the weights shrink.
    """
    size, known = hidden.shape[1], has_before.unsqueeze(1)
    hidden_mean, logits_mean = hidden.float().mean(0), logits.float().mean(0)
    before_mean = (before.float() * known).sum(0) / known.sum().clamp(min=1)
    inputs = torch.cat([hidden.float() - hidden_mean, (before.float() - before_mean) * known], dim=1)  # [T, 2 H]
    gram = (inputs.T @ inputs).double()
    prior = torch.zeros(2 * size, len(router), dtype=torch.float64)
    prior[:size] = router.T.double()
    scale = gram.diagonal().reshape(2, size).mean(1).clamp(min=1e-12)
    shrinkage = (SHRINKAGE * scale).repeat_interleave(size)
    right = (inputs.T @ (logits.float() - logits_mean)).double() + shrinkage.unsqueeze(1) * prior
    gram.diagonal().add_(shrinkage)
    solved = torch.cholesky_solve(right, torch.linalg.cholesky(gram)).float()  # [2 H, E]
    first_bias = logits_mean - hidden_mean @ solved[:size]
    return Correction(solved.T.contiguous(), first_bias - before_mean @ solved[size:], first_bias, 0.0, 30.0)


def with_confidence(correction: Correction, margins: torch.Tensor, wanted: torch.Tensor) -> Correction:
    """Return the correction with fitted probabilities. The text must be different from the text on which the weights
    were fitted.

    `margins`: the margins of the predictions for that text. `wanted`: whether each expert was needed, in the same
    shape. The likelihood is maximised by Newton's method; a slight shrinkage keeps the result finite if a threshold
    separates both classes completely.
    """
    margin, truth = margins.reshape(-1).double(), wanted.reshape(-1).double()
    spread = margin.std().clamp(min=1e-9)
    inputs = torch.stack([margin / spread, torch.ones_like(margin)], dim=1)
    found, shrinkage = torch.zeros(2, dtype=torch.float64), 1e-3 * torch.eye(2, dtype=torch.float64)
    for _ in range(_NEWTON_STEPS):
        probable = (inputs @ found).sigmoid()
        slopes = inputs.T @ (truth - probable) - shrinkage @ found
        curvature = (inputs * (probable * (1 - probable)).unsqueeze(1)).T @ inputs + shrinkage
        found = found + torch.linalg.solve(curvature, slopes).clamp(-_LARGEST_STEP, _LARGEST_STEP)
    return correction._replace(slope=float(found[0] / spread), offset=float(found[1]))
