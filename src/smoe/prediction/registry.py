"""Predictors by name. Adding one is one file, one line here, and its name in `policy/registry.py`."""

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
    """The routers of a model, as predictors know them."""
    return tuple(RoutedLayer(site.layer, site.experts, spec.anatomy.top_k[site.layer]) for site in spec.sites)


@dataclass(frozen=True)
class PredictorInputs:
    """What predictors are made from: the model whose experts they guess."""

    model: PreTrainedModel
    spec: ModelSpec
    rules: Mapping[int, ScoringRule]
    """How routers score, by layer; empty where scores are not needed."""
    what: str
    """Which of the predicted experts are worth a load (`policy.registry.PREFETCH_WHAT`)."""
    depth: int
    """Layers ahead that are guessed at most, by those predictors that can guess more than one."""
    corrections: Mapping[tuple[int, int], Correction] | None = None
    """What has been learned for the prefetch `corrected-gates`, by the layer asked at and the layer asked for."""
    fitted: Fitted | None = None
    """What was fitted on traces of the model, where the predictor asked for is such a one."""
    shadow: Predictor | None = None
    """What says what a copy in fewer bits does, where it is the predictor asked for."""

    @property
    def routed_layers(self) -> tuple[RoutedLayer, ...]:
        """What the model's routers can say."""
        return routed_layers(self.spec)

    @cached_property
    def next_gate(self) -> NextGate:
        """One for all that ask it: it hears every router once."""
        return NextGate(self.model, self.spec.sites, self.spec.anatomy.gates, self.rules, self.what)

    @property
    def ranking(self) -> Ranking:
        """How logits become a choice; needs the rules."""
        return Ranking(self.rules, self.spec.anatomy.top_k, self.next_gate)


def _look_ahead(subject: PredictorInputs) -> Predictor:
    return LookAhead(subject.model, subject.spec.sites, subject.spec.anatomy.routers, subject.next_gate)


def _stacked_gates(subject: PredictorInputs) -> Predictor:
    """Raises `UnsupportedModelError` where a router cannot be stacked; it has a rule, or loading would have ended."""
    matrices = matrices_of(subject.model, subject.spec)
    return StackedGates(subject.spec.sites, matrices, subject.ranking, subject.depth, subject.spec.dtype.torch)


def _corrected_gates(subject: PredictorInputs) -> Predictor:
    """Raises `ConfigError` where nothing was learned, which a loaded model has been asked before."""
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
