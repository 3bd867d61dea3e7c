"""Predicts experts from the most similar past sequence (MoE-Infinity, arXiv 2401.14361).

    matrix of a sequence   [L, E]: how often each layer chose each expert
    this sequence so far   ---> the nearest stored matrix ---> its counts in the next layer

The similarity of two matrices is the cosine between their rows, averaged over all layers (one row is one layer). A new
sequence begins with a prompt. If a text is processed token by token without a prompt, its matrix covers all tokens so
far.

Letters: L layers, E experts, M stored matrices, S running sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smoe.prediction.activation_path import Paths, RoutedLayer, multi_hot
from smoe.prediction.history import FittedPredictor
from smoe.routing import Phase

MOST_MATRICES = 128
"""The largest number of past sequences that are stored. If there are more, evenly spaced ones are selected."""


def matrices_of(paths: Paths) -> np.ndarray:
    """Return [M, L, E]: for each of at most `MOST_MATRICES` sequences, how often each layer chose each expert."""
    widest = max(layer.experts for layer in paths.layers)
    found = [multi_hot(chosen, widest).sum(axis=0) for chosen in paths.of_sequences()]
    chosen_places = np.linspace(0, len(found) - 1, min(len(found), MOST_MATRICES)).round().astype(int)
    return np.stack([found[number] for number in chosen_places])


class ActivationMatrix(FittedPredictor):
    """Predicts the experts that the most similar past sequence used most."""

    usual_recall = 0.25

    def __init__(self, layers: Sequence[RoutedLayer], matrices: np.ndarray) -> None:
        """`matrices`: [M, L, E] counts, as `matrices_of` returns them."""
        super().__init__(layers)
        self._directions = _unit(matrices)
        """[M, L, E] the stored matrices, with every row scaled to length 1, which does not change the order of the
        experts."""
        self._counts = np.zeros((0, *matrices.shape[1:]), dtype=np.float32)
        """[S, L, E] how often each layer has chosen each expert in the running sequences."""
        self._alike = np.zeros((0, *matrices.shape[:2]), dtype=np.float32)
        """[S, M, L] the cosine between each row of a running and a stored sequence's matrix."""
        self._phase = Phase.DECODE

    @classmethod
    def fit(cls, paths: Paths) -> dict[str, np.ndarray]:
        return {"matrices": matrices_of(paths)}

    def _observe(self, place: int, phase: Phase, chosen: np.ndarray) -> None:
        is_new = phase is Phase.PREFILL and self._phase is Phase.DECODE
        self._phase = phase
        if is_new or len(self._counts) != len(chosen):
            self._counts = np.zeros((len(chosen), *self._directions.shape[1:]), dtype=np.float32)
            self._alike = np.zeros((len(chosen), *self._directions.shape[:2]), dtype=np.float32)
        layer = self.layers[place]
        hot = np.zeros((*chosen.shape[:2], max(self._directions.shape[2], layer.experts) + 1), dtype=np.float32)
        np.put_along_axis(hot, chosen, 1.0, axis=-1)
        hot[..., layer.experts] = 0.0  # padding
        row = self._counts[:, place]  # [S, E]
        row += hot[..., : row.shape[-1]].sum(axis=1)
        self._alike[:, :, place] = _unit(row) @ self._directions[:, place].T

    def _scores(self, place: int, path: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        nearest = self._alike[list(rows)].sum(axis=-1).argmax(axis=-1)  # [R]
        found: np.ndarray = self._directions[nearest, place]
        return found


def _unit(rows: np.ndarray) -> np.ndarray:
    """Return the rows divided by their length, so that each has length 1. Rows of zeros are unchanged."""
    found: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
    return found.astype(np.float32)
