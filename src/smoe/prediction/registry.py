"""The predictors by name. A new one is one file, one line here, and its name in `policy/registry.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel

from smoe.bounds import CORRECTED_GATES
from smoe.errors import ConfigError
from smoe.models.router_matrix import matrices_of
from smoe.models.scoring import ScoringRule
from smoe.models.spec import ModelSpec
from smoe.policy.prediction import Predictor
from smoe.policy.registry import FITTED_PREFETCH, SHADOW
from smoe.prediction.activation_path import RoutedLayer
from smoe.prediction.corrected_gates import CorrectedGates
from smoe.prediction.correction import Correction
from smoe.prediction.fitted import Fitted
from smoe.prediction.look_ahead import LookAhead
from smoe.prediction.next_gate import NextGate
from smoe.prediction.previous_token import PreviousToken
from smoe.prediction.ranking import Ranking
from smoe.prediction.stacked_gates import StackedGates
from smoe.prediction.whole_layer import WholeLayer


def routed_layers(spec: ModelSpec) -> tuple[RoutedLayer, ...]:
    """Return the sizes of a model's routers."""
    return tuple(RoutedLayer(site.layer, site.experts, spec.anatomy.top_k[site.layer]) for site in spec.sites)


@dataclass(frozen=True)
class PredictorInputs:
    """The inputs from which predictors of one model are made."""

    model: PreTrainedModel
    spec: ModelSpec
    rules: Mapping[int, ScoringRule]
    """The scoring rules of routers, by layer; empty where scores are not needed."""
    what: str
    """Which of the predicted experts are worth a load (`policy.registry.PREFETCH_WHAT`)."""
    depth: int
    """The most layers ahead, for predictors of more than one layer."""
    corrections: Mapping[tuple[int, int], Correction] | None = None
    """The corrections for the prefetch `corrected-gates`, by (current layer, predicted layer); None: none were
    learned."""
    fitted: Fitted | None = None
    """The predictor fitted on traces of the model, where one is selected."""
    shadow: Predictor | None = None
    """The predictor that follows a draft model, where it is selected."""

    @property
    def routed_layers(self) -> tuple[RoutedLayer, ...]:
        """The sizes of the model's routers."""
        return routed_layers(self.spec)

    @cached_property
    def next_gate(self) -> NextGate:
        """The next gate that all predictors share."""
        return NextGate(self.model, self.spec.sites, self.spec.anatomy.gates, self.rules, self.what)

    @property
    def ranking(self) -> Ranking:
        """The ranking of logits; requires the rules."""
        return Ranking(self.rules, self.spec.anatomy.top_k, self.next_gate)


def _look_ahead(subject: PredictorInputs) -> Predictor:
    return LookAhead(subject.model, subject.spec.sites, subject.spec.anatomy.routers, subject.next_gate)


def _stacked_gates(subject: PredictorInputs) -> Predictor:
    """Make the predictor. Raises `UnsupportedModelError` for a router that cannot be stacked."""
    matrices = matrices_of(subject.model, subject.spec)
    return StackedGates(subject.spec.sites, matrices, subject.ranking, subject.depth, subject.spec.dtype.torch)


def _corrected_gates(subject: PredictorInputs) -> Predictor:
    """Make the predictor. Raises `ConfigError` where nothing was learned."""
    if subject.corrections is None:
        raise ConfigError(
            f"`prefetch` {CORRECTED_GATES}: no corrections have been learned, or none were handed over",
            setting="prefetch",
            given=CORRECTED_GATES,
            allowed="for a model whose corrections have been learned",
        )
    parameter = next(subject.model.parameters())
    corrections = {
        layers: correction.to(parameter.device, subject.spec.dtype.torch)
        for layers, correction in subject.corrections.items()
    }
    return CorrectedGates(subject.spec.sites, corrections, subject.ranking, subject.depth)


def _fitted(subject: PredictorInputs) -> Predictor:
    assert subject.fitted is not None, "read before the budget is divided"
    return subject.fitted.predictor()


def _shadow(subject: PredictorInputs) -> Predictor:
    assert subject.shadow is not None, "opened before the engine"
    return subject.shadow


PREDICTORS: dict[str, Callable[[PredictorInputs], Predictor | None]] = {
    "none": lambda subject: None,
    "next-gate": lambda subject: subject.next_gate,
    "look-ahead": _look_ahead,
    "stacked-gates": _stacked_gates,
    "corrected-gates": _corrected_gates,
    SHADOW: _shadow,
    "whole-layer": lambda subject: WholeLayer(subject.spec.sites),
    "previous-token": lambda subject: PreviousToken(subject.routed_layers),
    **dict.fromkeys(FITTED_PREFETCH, _fitted),
}
