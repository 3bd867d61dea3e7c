"""Predicts the experts of several later layers by all their routers at once, on this layer's router input.

                            | router of l+1 |
    router input of layer l | ...           | ---> one product ---> logits of l+1 ... l+p ---> choices
                            | router of l+p |

This is HOBBIT's layer-level adaptive prefetch (arXiv 2411.01433, section 3.3). Residual streams change little from
layer to layer, so a later layer's choice can be predicted. It is used where the nearer layers already have all
predicted experts; `plan_prefetch` decides that. The routers' matrices are copied once, stacked in the order of their
layers, so that any p neighbours are a view; the copy is an entry of the ledger (`ModelSpec.router_bytes`). No module of
the model is called, so no hook sees a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from smoe.models.outline import ExpertsSite
from smoe.models.router_matrix import RouterMatrix
from smoe.policy.prediction import Prediction, Predictor, Sight
from smoe.prediction.ranking import Ranking


class StackedGates(Predictor):
    """Predicts the experts of the next `depth` MoE layers by their stacked routers."""

    def __init__(
        self,
        sites: Sequence[ExpertsSite],
        matrices: Mapping[int, RouterMatrix],
        ranking: Ranking,
        depth: int,
        dtype: torch.dtype,
    ) -> None:
        """`matrices`: of every layer except the first, which is not predicted; `dtype`: that of hidden states."""
        self._ranking = ranking
        self._experts = {site.layer: site.experts for site in sites}
        layers = [site.layer for site in sites]
        self._following = {layer: layers[n : n + depth] for n, layer in enumerate(layers, start=1)}
        self._begin: dict[int, int] = {}
        """The first row of each layer's router in the stack."""
        rows = 0
        for layer in layers[1:]:
            self._begin[layer] = rows
            rows += self._experts[layer]
        self._stack = _stacked([matrices[layer] for layer in layers[1:]], dtype)

    def predict(self, sight: Sight) -> Iterable[Prediction]:
        if not self._following[sight.layer]:
            return ()
        hidden = sight.hidden if sight.rows is None else sight.hidden[list(sight.rows)]
        self._ranking.serve_with(self)
        logits = self.logits(sight.layer, hidden)
        # one product for all layers; ranking each takes as long again, and usually only the nearest is read
        return (self._ranking.named(layer, of) for layer, of in logits.items())

    def logits(self, layer: int, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the logits [T, E] of the routers after `layer`, nearest first, for hidden [T, H]."""
        following = self._following[layer]
        begin, end = self._begin[following[0]], self._begin[following[-1]] + self._experts[following[-1]]
        weight, bias = self._stack
        stacked = RouterMatrix(weight[begin:end], None if bias is None else bias[begin:end])
        logits = stacked.logits(hidden.detach())  # [T, sum of E]
        sizes = [self._experts[after] for after in following]
        return dict(zip(following, logits.split(sizes, dim=-1), strict=True))


def _stacked(matrices: Sequence[RouterMatrix], dtype: torch.dtype) -> RouterMatrix:
    """Return the stacked matrices [sum of E, H], and biases [sum of E] if any router has one, with zeros for the
    others."""
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
