"""Finds a router's matrix [E, H] among its parameters, and verifies that it computes the router's logits.

With the matrices, the logits of several routers can be computed in one product. Most routers compute `F.linear(hidden,
weight)`, some with a bias, some in float32, under varying names. So every parameter of the right shape is tried on
random input, with every possible bias and without. If no product equals the router's logits, an error is raised.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from smoe.errors import UnsupportedModelError
from smoe.models.scoring import PROOF_TOKENS, TOLERANCE, answer_of
from smoe.models.spec import ModelSpec


class RouterMatrix(NamedTuple):
    """A router as a matrix: logits [T, E] = hidden [T, H] @ transposed `weight` [H, E] + `bias`."""

    weight: torch.Tensor
    """The matrix [E, H]."""
    bias: torch.Tensor | None
    """The bias [E], or None."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, E] for hidden states [T, H], computed in the dtype of `hidden`."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return functional.linear(hidden, self.weight.to(hidden.dtype), bias)


def matrices_of(model: nn.Module, spec: ModelSpec) -> dict[int, RouterMatrix]:
    """Return the router matrix of every MoE layer except the first, which is never predicted.

    They are the model's own parameters. Raises `UnsupportedModelError` if a router is not a matrix product.
    """
    modules = dict(model.named_modules())
    hidden, found = spec.config.get_text_config().hidden_size, {}
    for site in spec.sites[1:]:
        router, block = modules[spec.anatomy.routers[site.layer]], modules[site.name.rpartition(".")[0]]
        found[site.layer] = find_matrix(router, block, hidden, site.experts, spec.dtype.torch, site.layer)
    return found


def find_matrix(
    router: nn.Module, block: nn.Module, hidden: int, experts: int, dtype: torch.dtype, layer: int
) -> RouterMatrix:
    """Return the router's parameters whose product in `dtype` is closest to its logits.

    `block` is the module around the router, as for `find_rule`. Raises `UnsupportedModelError` if the difference
    exceeds rounding.
    """
    device = next(router.parameters()).device
    generator = torch.Generator().manual_seed(layer)
    x = torch.randn(PROOF_TOKENS, hidden, generator=generator).to(dtype).to(device)
    parameters = [parameter.detach() for parameter in router.parameters()]
    weights = [value for value in parameters if value.shape == (experts, hidden)]
    biases = [value for value in parameters if value.shape == (experts,)]
    with torch.no_grad():
        logits = answer_of(router, block, x, experts)[0].float()
        matrices = [RouterMatrix(weight, bias) for weight, bias in itertools.product(weights, [None, *biases])]
        errors = [(matrix.logits(x).float() - logits).abs().max().item() for matrix in matrices]
    error = min(errors, default=math.inf)
    if not error <= TOLERANCE[dtype] * logits.abs().max().item():  # `not <=` also refuses NaN
        raise UnsupportedModelError(
            f"the router of layer {layer} ({type(router).__name__}) does not simply multiply its input by a matrix, "
            "as stacked-gates requires; give another `prefetch`, such as next-gate"
        )
    return matrices[errors.index(error)]
