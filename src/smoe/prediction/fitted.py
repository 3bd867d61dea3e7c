"""The stored form of predictors that are fitted on recorded routing (the experts that each token chose, layer by
layer), and how a predictor is made from this form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch

from smoe.errors import ConfigError
from smoe.plug_ins import PLACE
from smoe.policy.registry import FITTED, PREDICTORS
from smoe.prediction.activation_path import Paths, RoutedLayer
from smoe.prediction.history import FittedPredictor, FromHistory

Tensors = Mapping[str, torch.Tensor]


def fitted_kind(name: str) -> type[FittedPredictor]:
    """Return the class of a fitted predictor. Raise `ConfigError` if no fitted predictor has this name."""
    found = PREDICTORS.find(name)
    if not found.is_fitted:
        raise ConfigError.no_choice("predictor", name, (*FITTED, PLACE))
    return cast("type[FittedPredictor]", found)


@dataclass(frozen=True)
class Fitted:
    """The stored form of a fitted predictor."""

    name: str
    """The predictor's name in `policy.registry.PREDICTORS`; its class has `is_fitted`."""
    layers: tuple[RoutedLayer, ...]
    tensors: Tensors
    tokens: int
    """The number of tokens on which the predictor was fitted."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def predictor(self) -> FromHistory:
        """Return a new predictor, which has not observed any routing yet."""
        return fitted_kind(self.name).of_fit(self.layers, self.tensors)


def counted(name: str, paths: Paths) -> Fitted:
    """Return the stored form of a predictor that is fitted by counting, not by training."""
    tensors = {key: torch.from_numpy(value) for key, value in fitted_kind(name).fit(paths).items()}
    return Fitted(name, paths.layers, tensors, len(paths.chosen))
