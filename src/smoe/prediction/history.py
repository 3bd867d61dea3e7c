"""The base classes of predictors that use only the routers' choices, not hidden states or weights of the model.

    routers of layers 0 .. l have run -> scores of the experts of l+1 -> the best K of every row

Such a prediction depends only on the observed routing, so it is the same in the engine and on a trace in the simulator.
It does not say which experts are important: it contains K experts, in the order of their scores, whatever `alpha` is.

A layer's *place* is its index among the layers with experts. Letters: T tokens of a step, S sequences, R predicted
rows, E experts, K experts chosen for a token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from smoe.policy.prediction import Prediction, Predictor, Sight
from smoe.prediction.activation_path import NO_EXPERT, Paths, RoutedLayer
from smoe.routing import Phase, Routing

if TYPE_CHECKING:
    import torch

    from smoe.prediction.inputs import PredictorInputs


class HistoryInputs(NamedTuple):
    """The inputs of predictors that use only the routers' choices, for a recorded trace without a model. The names of
    the fields are those of `PredictorInputs`."""

    routed_layers: tuple[RoutedLayer, ...]
    learned: Any = None
    """The fitted predictor as it is stored for the model, if the predictor must be fitted."""


class FromHistory(Predictor):
    """The base of predictors that use only the experts chosen so far in this step, and data that `_observe` stores. One
    thread at a time may use it."""

    settings = ("prefetch_asked",)

    @classmethod
    def make(cls, inputs: PredictorInputs | HistoryInputs) -> FromHistory:
        return cls(inputs.routed_layers)

    def __init__(self, layers: Sequence[RoutedLayer]) -> None:
        self.layers = tuple(layers)
        self._places = {layer.layer: place for place, layer in enumerate(self.layers)}
        self._top_k = max(layer.top_k for layer in self.layers)
        self._path: list[np.ndarray] = []
        """[T, K] for every layer that was observed in this decode step."""

    def observe(self, routing: Routing) -> None:
        place = self._places[routing.layer]
        if place == 0:
            self._path = []
        chosen = np.asarray(routing.top_k_index, dtype=np.int64)  # [T, K of the layer]
        if routing.phase is Phase.DECODE and place == len(self._path):
            self._path.append(self._widened(chosen, routing.experts))
        self._observe(place, routing.phase, chosen.reshape(routing.sequences, -1, chosen.shape[-1]))

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        place = self._places[sight.layer] + 1
        if place == len(self.layers) or len(self._path) != place:
            return ()
        layer = self.layers[place]
        rows = list(range(len(self._path[0])) if sight.rows is None else sight.rows)
        scores = self._scores(place, np.stack([chosen[rows] for chosen in self._path], axis=1), rows) if rows else None
        return () if scores is None else (Prediction(layer.layer, best_first(scores[:, : layer.experts], layer.top_k)),)

    def _observe(self, place: int, phase: Phase, chosen: np.ndarray) -> None:
        """Receive the experts that the router of the layer at index `place` has chosen, for the tokens of every
        sequence: [S, T / S, K], with E for padding."""
        del place, phase, chosen

    @abstractmethod
    def _scores(self, place: int, path: np.ndarray, rows: Sequence[int]) -> np.ndarray | None:
        """Return scores [R, E] of the experts of the layer at index `place`; a higher score means a more probable
        expert. None if nothing is known from which to predict.

        `path`: [R, place, K], the earlier layers' choices for these rows in this step; `rows`: the rows' numbers.
        """

    def _widened(self, chosen: np.ndarray, experts: int) -> np.ndarray:
        """Return choices [T, K of the layer] as [T, K of the widest layer], with `NO_EXPERT` for padding."""
        wide = np.full((len(chosen), self._top_k), NO_EXPERT, dtype=np.int64)
        wide[:, : chosen.shape[1]] = np.where(chosen == experts, NO_EXPERT, chosen)
        return wide


class FittedPredictor(FromHistory):
    """A predictor whose parameters are computed from recorded paths (`smoe tune --predictor`)."""

    is_fitted = True
    learned = "smoe.load.fitted_predictor:StoredPredictor"

    @classmethod
    @abstractmethod
    def fit(cls, paths: Paths) -> dict[str, np.ndarray]:
        """Return the arrays computed from these paths, by the names of the constructor's arguments. They are stored for
        the model."""

    @classmethod
    def of_fit(cls, layers: Sequence[RoutedLayer], tensors: Mapping[str, torch.Tensor]) -> FromHistory:
        """Return a new predictor from the tensors that `fit` returned."""
        return cls(layers, **{name: tensor.numpy() for name, tensor in tensors.items()})

    @classmethod
    def make(cls, inputs: PredictorInputs | HistoryInputs) -> FromHistory:
        assert inputs.learned is not None, "read before the budget is divided"
        found: FromHistory = inputs.learned.fitted.predictor()
        return found


def best_first(scores: np.ndarray, top_k: int) -> list[int]:
    """Return the experts that are among the K best in any row of `scores` [R, E], ordered by their highest score; of
    equal scores the lowest number first."""
    index = np.argsort(-scores, axis=-1, kind="stable")[:, :top_k]
    if len(index) == 1:
        found: list[int] = index[0].tolist()
        return found
    best: dict[int, float] = {}
    for expert, score in zip(
        index.ravel().tolist(), np.take_along_axis(scores, index, -1).ravel().tolist(), strict=True
    ):
        best[expert] = max(score, best.get(expert, score))
    return sorted(best, key=lambda expert: (-best[expert], expert))
