"""Predicts the next layer's experts by a network that is trained on recorded paths (DuoServe, section 4.2).

    h: the experts that all layers before have chosen     |
    p: popularity of the layer's experts                  | -> seven fully connected layers -> a score for each expert
    a: affinity to each chosen expert of the layer before |

One network serves all layers: p and a identify the layer. Some details are not in the paper. Number i of E experts is
encoded as (i + 1) / E, so that 0 stands for padding. The input a consists of the affinity rows of the chosen experts.
The inputs p and a are multiplied by E, so that an average expert has the value 1. The six hidden widths halve from 2048
to 64, and the seventh layer gives the scores.

The network runs after the layer's router, on the computing thread or on its own (setting `prefetch_asked`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from smoe.prediction.activation_path import RoutedLayer
from smoe.prediction.affinity import rows_of
from smoe.prediction.history import FromHistory

WIDTHS = (2048, 1024, 512, 256, 128, 64)
DROPOUT = 0.1


def states(
    place: int, path: np.ndarray, layers: Sequence[RoutedLayer], popularity: np.ndarray, affinity: np.ndarray
) -> np.ndarray:
    """Return the inputs of the network (s in equations 4 and 5) for the layer at index `place`, which is 1 or more: [N,
    `state_width`] float32.

    `path`: [N, place or more, K], the experts chosen by the layers before; `popularity`: [L, E]; `affinity`: [L-1, E,
    E].
    """
    top_k, widest = path.shape[-1], popularity.shape[1]
    count, slots = len(path), (len(layers) - 1) * top_k
    found = np.zeros((count, state_width(layers)), dtype=np.float32)
    experts = np.array([layer.experts for layer in layers[:place]], dtype=np.float32)
    found[:, : place * top_k] = ((path[:, :place] + 1) / experts[:, None]).reshape(count, -1)
    found[:, slots : slots + widest] = popularity[place] * widest
    rows = rows_of(affinity[place - 1], path[:, place - 1])  # [N, K, E]
    found[:, slots + widest :] = rows.reshape(count, -1) * widest
    return found


def state_width(layers: Sequence[RoutedLayer]) -> int:
    """Return the number of inputs of the network for a model with these layers."""
    top_k, widest = max(layer.top_k for layer in layers), max(layer.experts for layer in layers)
    return (len(layers) - 1) * top_k + widest + top_k * widest


def network(inputs: int, outputs: int, widths: Sequence[int] = WIDTHS) -> nn.Sequential:
    """Return the untrained network: [N, inputs] -> logits [N, outputs]. It contains batch norms, which `folded` removes
    after training."""
    parts: list[nn.Module] = []
    for width in widths:
        parts += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(DROPOUT)]
        inputs = width
    return nn.Sequential(*parts, nn.Linear(inputs, outputs))


def nbytes_of(layers: Sequence[RoutedLayer]) -> int:
    """Return the bytes of memory that a trained predictor will take: the weights that `folded` returns, and the arrays
    of popularity and affinity."""
    widest = max(layer.experts for layer in layers)
    with torch.device("meta"):
        parts = network(state_width(layers), widest)
    weights = sum(weight.numel() for part in parts if isinstance(part, nn.Linear) for weight in part.parameters())
    return 4 * (weights + len(layers) * widest + (len(layers) - 1) * widest**2)


def folded(trained: nn.Sequential) -> dict[str, torch.Tensor]:
    """Return the weights of a trained network for inference: each batch norm is multiplied into the linear layer before
    it."""
    found: dict[str, torch.Tensor] = {}
    parts = list(trained)
    linears = [(at, part) for at, part in enumerate(parts) if isinstance(part, nn.Linear)]
    for number, (at, linear) in enumerate(linears):
        weight, bias = linear.weight.detach(), linear.bias.detach()
        norm = parts[at + 1] if at + 1 < len(parts) else None
        if isinstance(norm, nn.BatchNorm1d):
            assert norm.running_mean is not None and norm.running_var is not None
            scale = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
            weight, bias = weight * scale[:, None], (bias - norm.running_mean) * scale + norm.bias.detach()
        found[f"weight.{number}"], found[f"bias.{number}"] = weight.contiguous().clone(), bias.contiguous().clone()
    return found


class ExpertMLP(FromHistory):
    """Predicts the experts to which the network gives the highest scores."""

    def __init__(
        self,
        layers: Sequence[RoutedLayer],
        popularity: np.ndarray,
        affinity: np.ndarray,
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        """`popularity`: [L, E]; `affinity`: [L-1, E, E]; `weights`: as `folded` returns them, on the CPU."""
        super().__init__(layers)
        self._popularity, self._affinity = popularity, affinity
        count = sum(name.startswith("weight.") for name in weights)
        self._parts = [(weights[f"weight.{n}"], weights[f"bias.{n}"]) for n in range(count)]

    def _scores(self, place: int, path: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        given = states(place, path, self.layers, self._popularity, self._affinity)
        with torch.inference_mode():
            x = torch.from_numpy(given)
            for weight, bias in self._parts[:-1]:
                x = functional.linear(x, weight, bias).relu_()
            found: np.ndarray = functional.linear(x, *self._parts[-1]).numpy()
        return found
