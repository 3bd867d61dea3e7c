"""The score-based eviction of SMoE (second version, section IV-B, equation 3): forget the lowest mean score.

What counts is the score that the router gave, also to experts that it did not choose: an expert that often comes close
is the substitute of tomorrow. Scores are means over a window of the last steps j - n ... j of decoding. With several
rows in a step an expert's score is its highest over the rows. Where a trace has no scores, the chosen experts count
alike.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import inf

import numpy as np

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.routing import Phase, Routing

WINDOW = 64
"""n: the papers give none. Longer is a little better on one text, shorter forgets sooner (docs/papers/smoe.md)."""

_UNIT = 2.0**40
"""A score of 1 in whole numbers: finer than the router's own fp32, and a window of thousands of steps fits."""


class ScoreWindow(Eviction):
    """One global pool: scores are shares of their layer's sum, so layers can be compared. O(L x E) a question."""

    name = "score"

    def __init__(self, window: int = WINDOW) -> None:
        assert window >= 0, window
        self._steps = window + 1
        self._layers: dict[int, _Layer] = {}
        self._means = np.zeros((0, 0))
        """[L, E] mean scores of all experts."""
        self._is_resident = np.zeros((0, 0), dtype=bool)

    def insert(self, key: ExpertKey) -> None:
        self._fit(key[0], key[1] + 1)
        self._is_resident[key[0], key[1]] = True

    def remove(self, key: ExpertKey) -> None:
        self._is_resident[key[0], key[1]] = False

    def residents(self) -> set[ExpertKey]:
        layers, experts = self._is_resident.nonzero()
        return {(layer, expert, EXACT) for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True)}

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
        layer.put_means(self._means[number, :experts])

    def victims(self, count: int, shield: Container[ExpertKey]) -> list[ExpertKey]:
        found: list[ExpertKey] = []
        if count <= 0 or not self._means.size:
            return found
        candidates = np.where(self._is_resident, self._means, inf).reshape(-1)
        width = self._means.shape[1]
        while len(found) < count:
            place = int(candidates.argmin())  # the first of equals: ties break by (layer, expert)
            if candidates[place] == inf:
                break
            candidates[place] = inf
            key = (place // width, place % width, EXACT)
            if key not in shield:
                found.append(key)
        return found

    def worth(self, key: ExpertKey) -> float:
        layers, width = self._means.shape
        return float(self._means[key[0], key[1]]) if key[0] < layers and key[1] < width else 0.0

    def _fit(self, layer: int, experts: int) -> None:
        """Make room for a layer and an expert seen for the first time."""
        layers, width = self._means.shape
        if layer < layers and experts <= width:
            return
        more = ((0, max(0, layer + 1 - layers)), (0, max(0, experts - width)))
        self._means, self._is_resident = np.pad(self._means, more), np.pad(self._is_resident, more)


def _as_scores(routing: Routing) -> list[list[float]]:
    return [[float(expert in index) for expert in range(routing.experts)] for index in routing.top_k_index]


class _Layer:
    """The last steps of one layer, in a ring, and their sum.

    In whole numbers, so that adding a step and taking it away again leaves nothing: equal experts stay equal.
    """

    def __init__(self, experts: int, steps: int) -> None:
        self._ring = np.zeros((steps, experts), dtype=np.int64)
        self._sum = np.zeros(experts, dtype=np.int64)
        self._count = 0

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """One step: every row's scores of all experts; masked experts (minus infinity) count as zero."""
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
