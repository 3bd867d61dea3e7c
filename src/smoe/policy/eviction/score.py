"""SMoE's score-based eviction (second version, section IV-B, equation 3): evicts the expert with the lowest mean score.

The score counts also for experts that the router did not choose: an expert that often comes close is a future
substitute. Scores are means over a window of the last steps j - n ... j of decoding. In a step with several rows an
expert's score is its highest over the rows. Where a trace has no scores, every chosen expert counts 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.eviction.ranked import Ranked
from smoe.routing import Phase, Routing

WINDOW = 64
"""n, the length of the window; the papers give none. A longer window is slightly better on one text, a shorter one
adapts sooner (docs/papers/smoe.md)."""

_UNIT = 2.0**40
"""The integer that stands for a score of 1: finer than the router's fp32, and the sum of thousands of steps fits."""


class ScoreWindow(Ranked):
    """Ranks residents of all layers by mean score; scores are shares of their layer's sum, so that layers are
    comparable. `victims` costs O(L x E)."""

    name = "score"
    needs_scores = True
    is_orderless = True
    settings = ("score_window",)

    def __init__(self, window: int = WINDOW) -> None:
        assert window >= 0, window
        super().__init__(numbers=1)
        self._steps = window + 1
        self._layers: dict[int, _Layer] = {}

    @classmethod
    def of_settings(cls, settings: EvictionSettings) -> Eviction:
        return cls(WINDOW if settings.score_window is None else settings.score_window)

    def observe(self, routing: Routing) -> None:
        number, experts = routing.layer, routing.experts
        scores = routing.scores or _as_scores(routing)
        self._fit(number, experts)
        layer = self._layers.get(number)
        if layer is None:
            layer = self._layers[number] = _Layer(experts, self._steps)
        rows = [row for row, index in zip(scores, routing.top_k_index, strict=True) if min(index) != experts]
        if routing.phase is Phase.DECODE:
            if rows:
                layer.add(rows)
        else:
            for row in rows[-self._steps :]:  # a prompt's tokens are steps one after the other
                layer.add([row])
        layer.put_means(self._numbers[0, number, :experts])

    def _values(self) -> np.ndarray:
        means: np.ndarray = self._numbers[0]
        return means


def _as_scores(routing: Routing) -> list[list[float]]:
    return [[float(expert in index) for expert in range(routing.experts)] for index in routing.top_k_index]


class _Layer:
    """A ring of the last steps of one layer, and their sum.

    Values are integers, so that adding and subtracting a step is exact: equal experts stay equal.
    """

    def __init__(self, experts: int, steps: int) -> None:
        self._ring = np.zeros((steps, experts), dtype=np.int64)
        self._sum = np.zeros(experts, dtype=np.int64)
        self._count = 0

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """Add one step: the scores of all experts for every row. Masked experts (minus infinity) count as zero."""
        if len(rows) == 1 and min(rows[0]) >= 0.0:  # the usual step: as few operations as may be
            values = np.multiply(rows[0], _UNIT / max(sum(rows[0]), 1e-30))
        else:
            values = np.maximum(rows, 0.0)
            values *= _UNIT / np.maximum(values.sum(axis=1, keepdims=True), 1e-30)
            values = values.max(axis=0)
        step = self._ring[self._count % len(self._ring)]
        self._sum -= step
        step[:] = values
        self._sum += step
        self._count += 1

    def put_means(self, row: np.ndarray) -> None:
        """Write the mean scores into `row` [E]."""
        np.divide(self._sum, _UNIT * max(1, min(self._count, len(self._ring))), out=row)
