"""Predicts the experts of several later layers by applying all their routers at once to this layer's router input.

                            | router of l+1 |
    router input of layer l | ...           | ---> one product ---> logits of l+1 ... l+p ---> choices
                            | router of l+p |

This is HOBBIT's layer-level adaptive prefetch (arXiv 2411.01433, section 3.3). Residual streams change little from
layer to layer, so the choice of a later layer can be predicted. The prediction for a later layer is used only if all
predicted experts of the nearer layers are resident or in flight (`plan_prefetch`).

The routers' matrices are copied once, one below the other in the order of their layers. The matrices of p consecutive
layers are then a view of the copy, which is an entry of the ledger (`ModelSpec.router_bytes`). No module of the model
is called, so no hook observes a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from smoe.models.outline import ExpertsSite
from smoe.models.router_matrix import RouterMatrix
from smoe.policy.prediction import Prediction, Predictor, Sight
from smoe.prediction.ranking import Ranking


class StackedGates(Predictor):
    """Predicts the experts of the next `depth` MoE layers by their routers in one matrix product."""

    def __init__(
        self,
        sites: Sequence[ExpertsSite],
        matrices: Mapping[int, RouterMatrix],
        ranking: Ranking,
        depth: int,
        dtype: torch.dtype,
    ) -> None:
        """`matrices`: the routers' matrices of every layer except the first, which is never predicted. `dtype`: the
        data type of the hidden states."""
        self._ranking = ranking
        self._experts = {site.layer: site.experts for site in sites}
        layers = [site.layer for site in sites]
        self._following = {layer: layers[n : n + depth] for n, layer in enumerate(layers, start=1)}
        self._begin: dict[int, int] = {}
        """For each layer, the first row of its router in the stacked matrix."""
        rows = 0
        for layer in layers[1:]:
            self._begin[layer] = rows
            rows += self._experts[layer]
        self._stack = _stacked([matrices[layer] for layer in layers[1:]], dtype)

    def predict(self, sight: Sight) -> Iterable[Prediction]:
        if not self._following[sight.layer]:
            return ()
        hidden = sight.hidden if sight.rows is None else sight.hidden[list(sight.rows)]
        logits = self.logits(sight.layer, hidden)
        # a generator, because ranking a layer takes as long as the product, and usually only the nearest is used
        return (self._ranking.named(layer, of, self.grading) for layer, of in logits.items())

    def logits(self, layer: int, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return {layer: logits [T, E]} of the routers after `layer`, the nearest layer first, computed from the router
        input `hidden` [T, H] of `layer`."""
        following = self._following[layer]
        begin, end = self._begin[following[0]], self._begin[following[-1]] + self._experts[following[-1]]
        weight, bias = self._stack
        stacked = RouterMatrix(weight[begin:end], None if bias is None else bias[begin:end])
        logits = stacked.logits(hidden.detach())  # [T, sum of E]
        sizes = [self._experts[after] for after in following]
        return dict(zip(following, logits.split(sizes, dim=-1), strict=True))


def _stacked(matrices: Sequence[RouterMatrix], dtype: torch.dtype) -> RouterMatrix:
    """Return the routers' matrices one below the other, [sum of E, H], and their biases [sum of E]. Routers without a
    bias have zeros. The biases are None if no router has one."""
    if not matrices:
        return RouterMatrix(torch.empty(0, 0), None)
    first = matrices[0].weight
    rows = sum(len(matrix.weight) for matrix in matrices)
    weight = torch.empty(rows, first.shape[1], dtype=dtype, device=first.device)
    bias = None if all(matrix.bias is None for matrix in matrices) else weight.new_zeros(rows)
    begin = 0
    for matrix in matrices:
        end = begin + len(matrix.weight)
        weight[begin:end] = matrix.weight
        if bias is not None and matrix.bias is not None:
            bias[begin:end] = matrix.bias
        begin = end
    return RouterMatrix(weight, bias)
