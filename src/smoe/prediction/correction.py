"""A learned correction of a router: what the layers between will have done to its input, as one product.

    router input of layer l, this token  [T, H] --+
                                                  |-- weight [E, 2 H], bias [E] --> logits of layer l + d
    router input of l + d, token before  [T, H] --+

A router's logits are linear in its input, so a linear guess of that input folds into the router's own matrix and costs
no more than the product itself. The second input is known, too, by the time that a token reaches layer l: attention
carries much of the token before on. `smoe tune --predictor corrected-gates` learns it by ridge regression, in closed
form, with the router itself as what is believed before anything is seen: weights that the text says nothing about stay
the router's own, and nothing learned at all is the stacked gates' guess.

How sure a guess is comes from data that the regression has not seen: the probability that an expert is wanted is a
logistic function of its margin, how far it is inside the choice or outside. It is fitted by itself for each layer and
distance, as the same margin means less the further it was guessed ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from smoe.models.router_matrix import RouterMatrix

SHRINKAGE = 0.05
"""What the prior weighs, in parts of the mean variance of the inputs. With 500 tokens to learn from a fiftieth costs
8 points of recall on text that was not seen, with 8000 nothing (docs/log/prefetch.md)."""
_NEWTON_STEPS = 40
_LARGEST_STEP = 5.0


class Correction(NamedTuple):
    """How one layer's logits are guessed at another, and how sure it is."""

    weight: torch.Tensor
    """[E, 2 H]"""
    bias: torch.Tensor
    """[E]"""
    first_bias: torch.Tensor
    """[E], for a token whose predecessor is not known: its mean stands for it."""
    slope: float
    """Of the log odds that an expert is wanted, per unit of margin."""
    offset: float
    """Log odds at the margin 0."""

    def logits(self, hidden: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """[T, E] for hidden [T, H] and, where it is known, what the later layer's router was given for the tokens
        before [T, H]."""
        if before is None:
            return functional.linear(hidden, self.weight[:, : hidden.shape[-1]], self.first_bias)
        return functional.linear(torch.cat([hidden, before], dim=-1), self.weight, self.bias)

    def probabilities(self, margins: torch.Tensor) -> torch.Tensor:
        """How probable it is that an expert with such a margin is wanted; any shape."""
        return (margins * self.slope + self.offset).sigmoid()

    def to(self, device: torch.device, dtype: torch.dtype) -> Correction:
        """The same elsewhere, or in another type."""
        weight, bias, first_bias = (value.to(device, dtype) for value in self[:3])
        return Correction(weight, bias, first_bias, self.slope, self.offset)


def uncorrected(matrix: RouterMatrix) -> Correction:
    """A router itself as a correction: nothing learned, every guess sure."""
    weight = torch.cat([matrix.weight, torch.zeros_like(matrix.weight)], dim=-1)
    bias = weight.new_zeros(len(weight)) if matrix.bias is None else matrix.bias.to(weight.dtype, copy=True)
    return Correction(weight, bias, bias.clone(), 0.0, 30.0)


def fitted(
    hidden: torch.Tensor, before: torch.Tensor, has_before: torch.Tensor, logits: torch.Tensor, router: torch.Tensor
) -> Correction:
    """The correction that guesses `logits` [T, E] best by least squares, in fp32; how sure it is comes later.

    `hidden` and `before` [T, H] as for `Correction.logits`; `has_before` [T] says where there was a token before;
    `router` [E, H] is the later layer's own matrix, towards which the weights shrink.
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
    """The correction, as sure as its guesses have proved on text that it was not fitted on.

    `margins` of its guesses and whether each expert was wanted, of the same shape. By Newton's method on the logistic
    likelihood, shrunk so little that it only matters where the two can be separated without an error.
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
