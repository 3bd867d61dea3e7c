"""Predicts every expert of the next layer, as systems do that prefetch whole layers.

An example is MoESys (IEEE TSC 2024), with which DuoServe-MoE compares itself (section 6.1).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from smoe.models.outline import ExpertsSite
from smoe.policy.prediction import Prediction, Predictor, Sight


class WholeLayer(Predictor):
    """Predicts that all experts of the next MoE layer are needed."""

    def __init__(self, sites: Sequence[ExpertsSite]) -> None:
        self._following = {site.layer: after for site, after in itertools.pairwise(sites)}

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        after = self._following.get(sight.layer)
        return () if after is None else (Prediction(after.layer, range(after.experts)),)
