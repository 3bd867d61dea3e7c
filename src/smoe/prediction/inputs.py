"""The inputs from which predictors are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from smoe.models.scoring import ScoringRule
from smoe.models.spec import ModelSpec
from smoe.policy.prediction import Predictor
from smoe.prediction.activation_path import RoutedLayer
from smoe.prediction.next_gate import NextGate
from smoe.prediction.ranking import Ranking


def routed_layers(spec: ModelSpec) -> tuple[RoutedLayer, ...]:
    """Return the sizes of the routing in each layer of a model."""
    return tuple(RoutedLayer(site.layer, site.experts, spec.anatomy.top_k[site.layer]) for site in spec.sites)


@dataclass(frozen=True)
class PredictorInputs:
    """The inputs from which predictors of one model are made."""

    model: PreTrainedModel
    spec: ModelSpec
    rules: Mapping[int, ScoringRule]
    """The scoring rules of the routers, by layer; empty if no predictor needs scores."""
    what: str
    """Which of the predicted experts are worth a load (`policy.registry.PREFETCH_WHAT`)."""
    depth: int
    """The largest number of layers ahead that a predictor predicts."""
    learned: Any = None
    """The value of the class that the predictor declares in `learned`; None if it was not learned."""
    draft: Predictor | None = None
    """The predictor that follows a draft model, if one is selected."""

    @property
    def routed_layers(self) -> tuple[RoutedLayer, ...]:
        """The sizes of the routing in each of the model's layers."""
        return routed_layers(self.spec)

    @cached_property
    def next_gate(self) -> NextGate:
        """The predictor `next-gate`, which other predictors also use."""
        return NextGate(self.model, self.spec.sites, self.spec.anatomy.gates, self.rules, self.what)

    @property
    def ranking(self) -> Ranking:
        """A new `Ranking` for the model's routers; it requires `rules`."""
        return Ranking(self.rules, self.spec.anatomy.top_k, self.next_gate)
