"""Descriptions of the predictors whose own modules import torch. Each says what the predictor needs, for commands that
do not import torch, and makes the predictor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from smoe.bounds import DEFAULT_PREFETCH_DEPTH
from smoe.policy.prediction import Epochs, Moment, Predictor, PredictorKind

if TYPE_CHECKING:
    import torch

    from smoe.config import EngineConfig
    from smoe.models.spec import ModelSpec
    from smoe.prediction.activation_path import RoutedLayer
    from smoe.prediction.history import FromHistory, HistoryInputs
    from smoe.prediction.inputs import PredictorInputs


class NextGateKind(PredictorKind):
    """The description of the predictor `next-gate` (`next_gate.py`), which is made without importing torch."""

    usual_recall = 0.78

    @classmethod
    def make(cls, inputs: PredictorInputs) -> Predictor:
        return inputs.next_gate


class LookAheadKind(PredictorKind):
    """The description of the predictor `look-ahead` (`look_ahead.py`). Its recall is the one given in SMoE's paper
    (section VI-C)."""

    asked = Moment.RESIDENTS_DONE
    can_compete = False
    usual_recall = 0.82

    @classmethod
    def make(cls, inputs: PredictorInputs) -> Predictor:
        from smoe.prediction.look_ahead import LookAhead

        return LookAhead(inputs.model, inputs.spec.sites, inputs.spec.anatomy.routers, inputs.next_gate)


class StackedGatesKind(PredictorKind):
    """The description of the predictor `stacked-gates` (`stacked_gates.py`)."""

    needs_scores = True
    settings = ("prefetch_depth",)
    usual_recall = 0.78

    @classmethod
    def own_bytes(cls, spec: ModelSpec, config: EngineConfig) -> int:
        return spec.router_bytes

    @classmethod
    def make(cls, inputs: PredictorInputs) -> Predictor:
        """Return a new predictor. Raise `UnsupportedModelError` if a router is not a matrix product."""
        from smoe.models.router_matrix import matrices_of
        from smoe.prediction.stacked_gates import StackedGates

        matrices, dtype = matrices_of(inputs.model, inputs.spec), inputs.spec.dtype.torch
        return StackedGates(inputs.spec.sites, matrices, inputs.ranking, inputs.depth, dtype)


class CorrectedGatesKind(PredictorKind):
    """The description of the predictor `corrected-gates` (`corrected_gates.py`)."""

    learned = "smoe.load.gate_corrections:LearnedCorrections"
    needs_scores = True
    settings = ("prefetch_depth",)
    usual_recall = 0.88

    @classmethod
    def own_bytes(cls, spec: ModelSpec, config: EngineConfig) -> int:
        return spec.correction_bytes(config.prefetch_depth or DEFAULT_PREFETCH_DEPTH, config.max_sequences)

    @classmethod
    def make(cls, inputs: PredictorInputs) -> Predictor:
        from smoe.prediction.corrected_gates import CorrectedGates

        assert inputs.learned is not None, "read before the budget is divided"
        device, dtype = next(inputs.model.parameters()).device, inputs.spec.dtype.torch
        learned = inputs.learned.corrections
        corrections = {layers: correction.to(device, dtype) for layers, correction in learned.items()}
        return CorrectedGates(inputs.spec.sites, corrections, inputs.ranking, inputs.depth)


class DraftKind(PredictorKind):
    """The description of the predictor that follows a draft model (`runtime/running_ahead.py`)."""

    needs_scores = True
    settings = ("draft_precision", "draft_start", "draft_on", "draft_extra")
    has_weights = True
    can_compete = False

    @classmethod
    def make(cls, inputs: PredictorInputs) -> Predictor:
        assert inputs.draft is not None, "opened before the engine"
        return inputs.draft


class ExpertMLPKind(PredictorKind):
    """The description of the predictor in `expert_mlp.py`."""

    settings = ("prefetch_asked",)
    is_fitted = True
    trained_by = "smoe.eval.train_expert_mlp:train_expert_mlp"
    epochs = Epochs(15, 45)
    learned = "smoe.load.fitted_predictor:StoredPredictor"
    has_weights = True
    usual_recall = 0.65

    @classmethod
    def bytes_to_fit(cls, spec: ModelSpec) -> int:
        from smoe.prediction.expert_mlp import nbytes_of
        from smoe.prediction.inputs import routed_layers

        return nbytes_of(routed_layers(spec))

    @classmethod
    def make(cls, inputs: PredictorInputs | HistoryInputs) -> Predictor:
        assert inputs.learned is not None, "read before the budget is divided"
        found: FromHistory = inputs.learned.fitted.predictor()
        return found

    @classmethod
    def of_fit(cls, layers: Sequence[RoutedLayer], tensors: Mapping[str, torch.Tensor]) -> FromHistory:
        """Return a new predictor from stored tensors, as `FittedPredictor.of_fit` does."""
        from smoe.prediction.expert_mlp import ExpertMLP

        return ExpertMLP(layers, tensors["popularity"].numpy(), tensors["affinity"].numpy(), tensors)
