"""Predicts experts from those that the layer before has chosen (DuoServe, equation 3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from smoe.prediction.activation_path import NO_EXPERT, Paths, RoutedLayer, multi_hot
from smoe.prediction.history import FittedPredictor
from smoe.prediction.popularity import shares


def affinity_of(paths: Paths) -> np.ndarray:
    """Return [L-1, E, E], computed from recorded paths. Entry (l, i, j): among all choices that layer l+1 made for
    tokens for which layer l chose expert i, the fraction that went to expert j. It is 0 if i was never chosen."""
    widest = max(layer.experts for layer in paths.layers)
    hot = (multi_hot(paths.chosen[:, n], widest) for n in range(len(paths.layers)))  # two at a time in memory
    return shares(np.stack([before.T @ after for before, after in pairwise(hot)]))


def rows_of(affinity: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return [..., K, E]: for each of the `chosen` experts [..., K] of a layer, its row of the layer's affinity [E, E].
    The rows for `NO_EXPERT` are zeros."""
    found: np.ndarray = affinity[chosen] * (chosen != NO_EXPERT)[..., None]
    return found


class Affinity(FittedPredictor):
    """Predicts the experts that most often follow those chosen by the layer before: a Markov chain over the layers."""

    usual_recall = 0.53

    def __init__(self, layers: Sequence[RoutedLayer], affinity: np.ndarray) -> None:
        """`affinity`: [L-1, E, E], as `affinity_of` returns it."""
        super().__init__(layers)
        self._affinity = affinity

    @classmethod
    def fit(cls, paths: Paths) -> dict[str, np.ndarray]:
        return {"affinity": affinity_of(paths)}

    def _scores(self, place: int, path: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        found: np.ndarray = rows_of(self._affinity[place - 1], path[:, -1]).sum(axis=1)
        return found
