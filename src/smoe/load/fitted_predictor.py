"""Predictors that `smoe tune --predictor` has fitted to traces of a model. They are stored in the user's cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smoe.load.learned_file import LearnedValue, ModelShape, NotLearnedError, Tensors
from smoe.prediction.activation_path import RoutedLayer
from smoe.prediction.fitted import Fitted


@dataclass(frozen=True)
class StoredPredictor(LearnedValue):
    """A fitted predictor of one model."""

    how = "smoe tune on the model with `predictor={name}`"

    fitted: Fitted

    @property
    def name(self) -> str:
        return self.fitted.name

    @property
    def nbytes(self) -> int:
        return self.fitted.nbytes

    def contents(self) -> tuple[Tensors, dict[str, Any]]:
        of = self.fitted
        return of.tensors, {"predictor": of.name, "layers": of.layers, "tokens": of.tokens}

    @classmethod
    def of_contents(cls, name: str, tensors: Tensors, fields: dict[str, Any], model: ModelShape) -> StoredPredictor:
        if fields["predictor"] != name:
            raise NotLearnedError(
                f"the file of {name} holds the values of the predictor {fields['predictor']}, not of {name}"
            )
        layers = tuple(RoutedLayer(*layer) for layer in fields["layers"])
        return cls(Fitted(name, layers, tensors, fields["tokens"]))
