"""SMoE's score-based eviction (second version, section IV-B, equation 3): evicts the expert with the lowest mean score.

The scores of experts that the router did not choose count too: an expert that often comes close is a good substitute
later. Scores are averaged over a window of the last decode steps, j - n to j. In a step with several rows, an expert's
score is the highest of the rows. If a trace has no scores, every chosen expert has score 1 and the others 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from smoe.policy.eviction.ranked import Ranked
from smoe.routing import Phase, Routing

WINDOW = 64
"""n, the length of the window in steps; the papers give no value. A longer window is slightly better on one text, a
shorter one adapts sooner (docs/papers/smoe.md)."""

_UNIT = 2.0**40
"""The integer that represents a score of 1. It is finer than the router's fp32, and sums of thousands of steps fit in
64 bits."""


class ScoreWindow(Ranked):
    """Ranks residents of all layers by mean score. Scores are divided by the sum of their layer's scores, so that
    layers can be compared. `victims` costs O(L x E)."""

    name = "score"
    needs_scores = True
    is_orderless = True
    settings = ("score_window",)

    def __init__(self, score_window: int = WINDOW) -> None:
        assert score_window >= 0, score_window
        super().__init__(numbers=1)
        self._steps = score_window + 1
        self._layers: dict[int, _Layer] = {}

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
    """One layer's scores in the last steps, in a ring buffer, and the sum of these scores for every expert.

    Scores are stored as integers, so that adding and subtracting a step is exact: experts with equal scores have equal
    sums.
    """

    def __init__(self, experts: int, steps: int) -> None:
        self._ring = np.zeros((steps, experts), dtype=np.int64)
        self._sum = np.zeros(experts, dtype=np.int64)
        self._count = 0

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """Add the scores of one step. `rows`: the scores of all experts, for every row. Masked experts (minus infinity)
        count as zero."""
        if len(rows) == 1 and min(rows[0]) >= 0.0:  # the usual case, with as few operations as possible
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
        """Write the mean score of every expert into `row` [E]."""
        np.divide(self._sum, _UNIT * max(1, min(self._count, len(self._ring))), out=row)
