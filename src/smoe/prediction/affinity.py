"""Predicts experts from those of the layer before (DuoServe, equation 3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from smoe.prediction.activation_path import NO_EXPERT, Paths, RoutedLayer, multi_hot
from smoe.prediction.history import FittedPredictor
from smoe.prediction.popularity import shares


def affinity_of(paths: Paths) -> np.ndarray:
    """Return [L-1, E, E]: entry (l, i, j) is the share of expert j in the choices of layer l+1 for tokens with expert i
    in layer l; zeros where i was never chosen."""
    widest = max(layer.experts for layer in paths.layers)
    hot = (multi_hot(paths.chosen[:, n], widest) for n in range(len(paths.layers)))  # two at a time in memory
    return shares(np.stack([before.T @ after for before, after in pairwise(hot)]))


def rows_of(affinity: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the rows [..., K, E] of one layer's affinity [E, E] for chosen experts [..., K]; zeros for `NO_EXPERT`."""
    found: np.ndarray = affinity[chosen] * (chosen != NO_EXPERT)[..., None]
    return found


class Affinity(FittedPredictor):
    """Predicts the experts that most often follow those of the layer before: a Markov chain over the layers."""

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
