"""Predictors that are fitted on recorded paths: their stored form, and how they are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from smoe.errors import ConfigError
from smoe.plug_ins import PLACE
from smoe.policy.registry import PREDICTORS, fitted_names
from smoe.prediction.activation_path import Paths, RoutedLayer
from smoe.prediction.history import FittedPredictor, FromHistory

Tensors = Mapping[str, torch.Tensor]


def fitted_kind(name: str) -> type[FittedPredictor]:
    """Return the class of a fitted predictor; raise `ConfigError` if there is none of that name."""
    found = PREDICTORS.find(name)
    if not found.is_fitted:
        raise ConfigError.no_choice("predictor", name, (*fitted_names(), PLACE))
    return cast("type[FittedPredictor]", found)


@dataclass(frozen=True)
class Fitted:
    """The stored form of a fitted predictor."""

    name: str
    """A predictor of `policy.registry.PREDICTORS` with `is_fitted`."""
    layers: tuple[RoutedLayer, ...]
    tensors: Tensors
    tokens: int
    """The number of tokens that it was fitted on."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def predictor(self) -> FromHistory:
        """Return a new predictor, without observations."""
        return fitted_kind(self.name).of_fit(self.layers, self.tensors)


def counted(name: str, paths: Paths) -> Fitted:
    """Return a predictor that consists of counts."""
    tensors = {key: torch.from_numpy(value) for key, value in fitted_kind(name).fit(paths).items()}
    return Fitted(name, paths.layers, tensors, len(paths.chosen))
