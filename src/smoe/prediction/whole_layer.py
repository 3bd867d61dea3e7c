"""Predicts every expert of the next layer, as systems do that prefetch whole layers.

An example is MoESys (IEEE TSC 2024), with which DuoServe-MoE is compared in its paper (section 6.1).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from smoe.models.outline import ExpertsSite
from smoe.policy.prediction import Prediction, Predictor, Sight

if TYPE_CHECKING:
    from smoe.prediction.inputs import PredictorInputs


class WholeLayer(Predictor):
    """Predicts that the next MoE layer needs all of its experts."""

    names_whole_layers = True
    can_compete = False
    usual_recall = 1.0

    @classmethod
    def make(cls, inputs: PredictorInputs) -> WholeLayer:
        return cls(inputs.spec.sites)

    def __init__(self, sites: Sequence[ExpertsSite]) -> None:
        self._following = {site.layer: after for site, after in itertools.pairwise(sites)}

    def predict(self, sight: Sight) -> Sequence[Prediction]:
        after = self._following.get(sight.layer)
        return () if after is None else (Prediction(after.layer, range(after.experts)),)
