"""Predicts that a layer chooses the same experts as for the token before. Nothing has to be fitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smoe.prediction.activation_path import NO_EXPERT, RoutedLayer
from smoe.prediction.history import FromHistory
from smoe.routing import Phase


class PreviousToken(FromHistory):
    """Predicts the experts that the layer chose for the sequence's last token, in the router's order."""

    usual_recall = 0.25

    def __init__(self, layers: Sequence[RoutedLayer]) -> None:
        super().__init__(layers)
        self._last: dict[int, np.ndarray] = {}
        """For each layer, by its index among the MoE layers: [S, K], the experts chosen for each sequence's last
        token."""

    def _observe(self, place: int, phase: Phase, chosen: np.ndarray) -> None:
        experts = self.layers[place].experts
        length = chosen.shape[1]
        is_real = chosen.min(axis=-1) != experts  # [S, T / S]
        newest = length - 1 - np.argmax(is_real[:, ::-1], axis=1)
        last = chosen[np.arange(len(chosen)), newest]
        self._last[place] = np.where(last == experts, NO_EXPERT, last)

    def _scores(self, place: int, path: np.ndarray, rows: Sequence[int]) -> np.ndarray | None:
        last = self._last.get(place)
        if last is None or len(last) <= max(rows):  # a different batch
            return None
        chosen = last[list(rows)]
        width = self.layers[place].experts
        scores = np.zeros((len(rows), width + 1), dtype=np.float32)  # the last column is for NO_EXPERT
        order = np.arange(chosen.shape[1], 0, -1, dtype=np.float32)
        np.put_along_axis(scores, np.where(chosen == NO_EXPERT, width, chosen), order[None], axis=-1)
        return scores[:, :width]
