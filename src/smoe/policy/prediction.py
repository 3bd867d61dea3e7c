"""The interface of predictors of later layers' experts: when they run, what they receive, and what they return.

    one layer        | router | resident experts | wait for loads | missing experts |
    predictor runs          ^ ROUTED             ^ RESIDENTS_DONE

`Moment` lists two more times, at which the predictor runs concurrently with the layer's experts.

Tensors have the engine's type (torch), which this module does not import. A simulator has no tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

from smoe.policy.importance import ALL_IMPORTANT, Thresholds
from smoe.routing import Routing


class Moment(Enum):
    """The time at which a predictor runs."""

    ROUTED = "routed"
    """The predictor runs after the layer's router, before the layer's experts."""
    RESIDENTS_DONE = "residents done"
    """The predictor runs after the layer's resident experts are computed, while missing ones are loaded."""
    CONCURRENT = "concurrently with the experts"
    """The predictor runs after the layer's router, concurrently with the experts. Loads begin as soon as the prediction
    is ready. The predictor must not use modules of the model, since the computing thread uses them."""
    FIRST_DONE = "concurrently with the experts, loads after the first"
    """The predictor runs as with `CONCURRENT`, but loads begin when the first expert is computed (DuoServe-MoE, section
    5.3)."""


ASKED = {"before": Moment.ROUTED, "concurrent": Moment.CONCURRENT, "first-expert": Moment.FIRST_DONE}
"""The `Moment` for each value of the setting `prefetch_asked`. The setting applies to predictors that use only the
routers' choices."""
ON_A_THREAD = (Moment.CONCURRENT, Moment.FIRST_DONE)


class Sight(NamedTuple):
    """The inputs of a predictor at one layer. T is the number of tokens of the step, H the hidden size."""

    layer: int
    hidden: Any
    """[T, H]: the input of the layer's router."""
    partial: Any = None
    """[T, H]: the output of the resident experts; None at `Moment.ROUTED`."""
    rows: Sequence[int] | None = None
    """The tokens that need experts, without padding and finished rows; None: all."""


class Prediction(NamedTuple):
    """The experts that a later layer is expected to choose."""

    layer: int
    experts: Sequence[int]
    """The predicted experts, best first."""
    low: Container[int] = frozenset()
    """The experts for which a low-precision copy suffices, by their predicted importance."""
    is_next: bool = False
    """Whether the prediction is for the next token, whose layers run after all layers of the current one."""


class Grading(NamedTuple):
    """The thresholds by which the model's layers substitute experts and use low-precision copies. By them a predictor
    leaves out experts that are not worth a load."""

    alpha: float = 0.0
    """The substitution threshold."""
    thresholds: Thresholds = ALL_IMPORTANT
    """The importance thresholds, below which a low-precision copy of an expert suffices, or no copy is needed."""

    @property
    def is_exact(self) -> bool:
        """Whether no expert is substituted, dropped or computed in low precision, so that every expert that will be
        chosen is worth a load."""
        return self.alpha == 0 and self.thresholds == ALL_IMPORTANT


class Listener(Protocol):
    """An object that receives predictions as soon as they are made, on any thread."""

    def expect(self, position: int, named: Prediction) -> None:
        """Receive a prediction for the token at `position` of the text."""

    def withdraw(self, position: int) -> None:
        """Drop the predictions for this position and later ones, because the text from this position on is another one
        than predicted."""


class Epochs(NamedTuple):
    """How often a training passes over its text."""

    least: int
    most: int


class PredictorKind:
    """The properties of a predictor that are known before the predictor is made.

    A predictor's class declares these attributes itself. If its module imports torch, a class of `prediction/kinds.py`
    declares them instead, for commands that do not import torch.
    """

    asked: Moment = Moment.ROUTED
    needs_scores: ClassVar[bool] = False
    """Whether the predictor computes scores and choices from router logits, and so needs the router's rule for it."""
    settings: ClassVar[tuple[str, ...]] = ()
    """The settings of `EngineConfig` that apply to this predictor. `prefetch_asked` applies to predictors that use only
    the routers' choices, so that any thread can run them."""
    is_fitted: ClassVar[bool] = False
    """Whether the predictor must first be fitted on traces of the model (`prediction/fitted.py`)."""
    trained_by: ClassVar[str] = ""
    """MODULE:FUNCTION that trains the fitted predictor (as `eval/train_expert_mlp.py` does); empty: it is fitted by
    counting."""
    epochs: ClassVar[Epochs] = Epochs(0, 0)
    """How often this training passes over the text."""
    learned: ClassVar[str] = ""
    """MODULE:CLASS of the value (`load/learned_file.py`) that must be learned for the model before this is used; empty
    if there is none."""
    has_weights: ClassVar[bool] = False
    """Whether the predictor has weights whose size the model's files do not determine."""
    names_whole_layers: ClassVar[bool] = False
    """Whether the predictor can predict all experts of a layer, not only as many as a token chooses."""
    can_compete: ClassVar[bool] = True
    """Whether the predictor takes part in tournaments. Three kinds do not: baselines, predictors that run layers of the
    model (no other predictor can observe the model then), and predictors that leave less memory for experts."""
    usual_recall: ClassVar[float] = 0.5
    """The typical fraction of the next layer's experts that are predicted, for forecasts (docs/log/forecasts.md)."""

    @classmethod
    def own_bytes(cls, spec: Any, config: Any) -> int:
        """Return the bytes that the predictor stores for a `ModelSpec` and an `EngineConfig`, without fitted values."""
        del spec, config
        return 0

    @classmethod
    def bytes_to_fit(cls, spec: Any) -> int:
        """Return an upper bound of the bytes of fitted values, before they exist; 0 for mere counts."""
        del spec
        return 0

    @classmethod
    def make(cls, inputs: Any) -> Predictor | None:
        """Return a new predictor from `PredictorInputs`; None if it would predict nothing."""
        del inputs
        return None


class Predictor(PredictorKind, ABC):
    """A predictor of later layers' experts. It must not change the model's outputs."""

    grading: Grading = Grading()
    helpers: Sequence[Any] = ()
    """The predictor's threads, which are closed with the engine. They must not refer to the engine or its model."""

    @property
    def observes(self) -> bool:
        """Whether the predictor processes the routers' choices or inputs."""
        return (type(self).observe, type(self).observe_input) != (Predictor.observe, Predictor.observe_input)

    def grade_by(self, grading: Grading) -> None:
        """Decide by these thresholds from now on."""
        self.grading = grading

    def ask_at(self, moment: Moment) -> None:
        """Let the engine run the predictor at this time within a layer, from now on."""
        self.asked = moment

    def install(self) -> None:
        """Add hooks to the model. The engine calls this after it has replaced the model's experts."""

    def speak_to(self, listener: Listener) -> None:
        """Set a listener for predictions that are made between two layers. Only predictors with a thread make such
        predictions."""
        del listener

    def begin(self, ids: Any, cache: Any) -> None:
        """Prepare for a forward pass. `ids`: the token ids of the pass [rows, new positions]; None if the pass gets
        embeddings. `cache`: the KV cache of earlier tokens; None without one."""
        del ids, cache

    def observe(self, routing: Routing) -> None:
        """Receive a router's choice, before substitution. It is called for every layer of every step, in order."""
        del routing

    def observe_input(self, routing: Routing, hidden: Any) -> None:
        """Receive the input of the router, [T, H], whose choice `observe` has just received. It is not called if there
        are no tensors."""
        del routing, hidden

    @abstractmethod
    def predict(self, sight: Sight) -> Iterable[Prediction]:
        """Return predictions, the nearest layer first and those of the next token last; empty if there are none.

        The caller reads the result once, immediately, and stops at the first layer with missing experts. Later
        predictions may therefore be computed lazily.
        """
