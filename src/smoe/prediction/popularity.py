"""Predicts the experts that a layer chooses most often (DuoServe, equation 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smoe.prediction.activation_path import Paths, RoutedLayer, multi_hot
from smoe.prediction.history import FittedPredictor


def popularity_of(paths: Paths) -> np.ndarray:
    """Return [L, E]: for each expert, the fraction of its layer's choices that went to it. Entries beyond a layer's
    number of experts are zero."""
    widest = max(layer.experts for layer in paths.layers)
    counts = np.stack([multi_hot(paths.chosen[:, n], widest).sum(axis=0) for n in range(len(paths.layers))])
    return shares(counts)


def shares(counts: np.ndarray) -> np.ndarray:
    """Return each row of an array divided by its sum. Rows of zeros are unchanged."""
    found: np.ndarray = (counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1.0)).astype(np.float32)
    return found


class Popularity(FittedPredictor):
    """Predicts the most popular experts of a layer, the same for every token."""

    usual_recall = 0.23

    def __init__(self, layers: Sequence[RoutedLayer], popularity: np.ndarray) -> None:
        """`popularity`: [L, E], as `popularity_of` returns it."""
        super().__init__(layers)
        self._popularity = popularity

    @classmethod
    def fit(cls, paths: Paths) -> dict[str, np.ndarray]:
        return {"popularity": popularity_of(paths)}

    def _scores(self, place: int, path: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        return np.repeat(self._popularity[place : place + 1], len(rows), axis=0)
