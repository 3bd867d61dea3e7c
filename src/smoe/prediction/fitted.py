"""Predictors that are fitted on recorded paths: their stored form, and how they are made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from smoe.policy.registry import EXPERT_MLP
from smoe.prediction.activation_matrix import ActivationMatrix, matrices_of
from smoe.prediction.activation_path import Paths, RoutedLayer
from smoe.prediction.affinity import Affinity, affinity_of
from smoe.prediction.expert_mlp import ExpertMLP
from smoe.prediction.history import FromHistory
from smoe.prediction.popularity import Popularity, popularity_of

Tensors = Mapping[str, torch.Tensor]

_COUNTED: dict[str, Callable[[Paths], dict[str, np.ndarray]]] = {
    "popularity": lambda paths: {"popularity": popularity_of(paths)},
    "affinity": lambda paths: {"affinity": affinity_of(paths)},
    "activation-matrix": lambda paths: {"matrices": matrices_of(paths)},
}
"""For each predictor without training, the function that counts its tensors."""


@dataclass(frozen=True)
class Fitted:
    """The stored form of a fitted predictor."""

    name: str
    """One of `policy.registry.FITTED_PREFETCH`."""
    layers: tuple[RoutedLayer, ...]
    tensors: Tensors
    tokens: int
    """The number of tokens that it was fitted on."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def predictor(self) -> FromHistory:
        """Return a new predictor, without observations."""
        return _MAKE[self.name](self.layers, self.tensors)


def counted(name: str, paths: Paths) -> Fitted:
    """Return a predictor that consists of counts."""
    tensors = {key: torch.from_numpy(value) for key, value in _COUNTED[name](paths).items()}
    return Fitted(name, paths.layers, tensors, len(paths.chosen))


def _expert_mlp(layers: tuple[RoutedLayer, ...], tensors: Tensors) -> FromHistory:
    return ExpertMLP(layers, tensors["popularity"].numpy(), tensors["affinity"].numpy(), tensors)


_MAKE: dict[str, Callable[[tuple[RoutedLayer, ...], Tensors], FromHistory]] = {
    "popularity": lambda layers, tensors: Popularity(layers, tensors["popularity"].numpy()),
    "affinity": lambda layers, tensors: Affinity(layers, tensors["affinity"].numpy()),
    "activation-matrix": lambda layers, tensors: ActivationMatrix(layers, tensors["matrices"].numpy()),
    EXPERT_MLP: _expert_mlp,
}
