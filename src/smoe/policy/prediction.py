"""The interface of predictors of later layers' experts: when they run, what they see, and what they return.

    one layer        | router | resident experts | wait for loads | missing experts |
    predictor runs          ^ ROUTED             ^ RESIDENTS_DONE
                            | CONCURRENT: ......; the result is used as soon as it is there ..... |
                                | FIRST_DONE: the same, but loads begin after the first expert .... |

Arrays have the engine's type (torch tensors; none in a simulator), so this module does not import it.
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
    """The same as `CONCURRENT`, but loads begin when the first expert is computed (DuoServe-MoE, section 5.3)."""


ASKED = {"before": Moment.ROUTED, "concurrent": Moment.CONCURRENT, "first-expert": Moment.FIRST_DONE}
"""The moment for each value of the setting `prefetch_asked`; it applies to predictors that see only the routers'
choices."""
ON_A_THREAD = (Moment.CONCURRENT, Moment.FIRST_DONE)


class Sight(NamedTuple):
    """The inputs of a predictor."""

    layer: int
    hidden: Any
    """[T, H]: the layer's router input."""
    partial: Any = None
    """[T, H]: the output of the resident experts; None at `Moment.ROUTED`."""
    rows: Sequence[int] | None = None
    """Rows that need experts (no padding, no finished rows); None: all."""


class Prediction(NamedTuple):
    """Experts that a later layer is expected to need."""

    layer: int
    experts: Sequence[int]
    """The experts in order of preference, best first."""
    low: Container[int] = frozenset()
    """The experts for which a low copy suffices, by their predicted importance."""
    is_next: bool = False
    """Whether the prediction is for the next token, so that it is needed after all layers of the current one."""


class Listener(Protocol):
    """Receives predictions as soon as they are made, on any thread."""

    def expect(self, position: int, named: Prediction) -> None:
        """Expect these experts for the token at `position` of the text."""

    def withdraw(self, position: int) -> None:
        """Drop predictions for this position and later ones: they belonged to another text."""


class PredictorKind:
    """The needs of a kind of predictor, which are known before one is made.

    A predictor's class declares them. If its module imports torch, a class of `prediction/kinds.py` declares them
    instead, for commands that load no torch.
    """

    asked: Moment = Moment.ROUTED
    needs_scores: ClassVar[bool] = False
    """Whether it needs the rule from router logits to a choice."""
    settings: ClassVar[tuple[str, ...]] = ()
    """The settings of `EngineConfig` that belong to it. `prefetch_asked` belongs to predictors that see only the
    routers' choices: any thread may run them."""
    is_fitted: ClassVar[bool] = False
    """Whether it must first be fitted on traces of the model (`prediction/fitted.py`)."""
    has_weights: ClassVar[bool] = False
    """Whether it has weights whose size does not follow from the model's files."""
    names_whole_layers: ClassVar[bool] = False
    """Whether it can predict all experts of a layer, and not only as many as a token chooses."""
    can_compete: ClassVar[bool] = True
    """Whether it takes part in tournaments. Baselines do not, nor predictors that run layers of the model (no other one
    can observe the model then), nor those with less memory for experts than others."""
    usual_recall: ClassVar[float] = 0.5
    """The share of the next layer's experts that it predicts, for forecasts (docs/log/forecasts.md)."""

    @classmethod
    def own_bytes(cls, spec: Any, config: Any) -> int:
        """Return the bytes that it stores for a `ModelSpec` and an `EngineConfig`, without fitted values."""
        del spec, config
        return 0

    @classmethod
    def bytes_to_fit(cls, spec: Any) -> int:
        """Return the bytes of fitted values before they exist; 0 for counts."""
        del spec
        return 0

    @classmethod
    def make(cls, inputs: Any) -> Predictor | None:
        """Return a new predictor from `PredictorInputs`; None predicts nothing."""
        del inputs
        return None


class Predictor(PredictorKind, ABC):
    """A predictor of later layers' experts. It must not affect the model's outputs."""

    alpha: float = 0.0
    """The substitution threshold of the layers."""
    thresholds: Thresholds = ALL_IMPORTANT
    """The importance thresholds of the layers' missing experts."""
    helpers: Sequence[Any] = ()
    """Threads to close with the engine; they must not refer to the engine or its model."""

    def install(self) -> None:
        """Attach to the model, after the engine has replaced its experts."""

    def speak_to(self, listener: Listener) -> None:
        """Add a listener for predictions between two layers; only predictors with a thread make any."""
        del listener

    def begin(self, ids: Any, cache: Any) -> None:
        """Prepare for a forward pass. `ids`: its tokens [rows, new positions]; None where embeddings were given.
        `cache`: the cache of earlier tokens; None without one."""
        del ids, cache

    def observe(self, routing: Routing) -> None:
        """Process a router's choice, before any replacement: called for every layer of every step, in order."""
        del routing

    def observe_input(self, routing: Routing, hidden: Any) -> None:
        """Process that router's input, hidden [T, H], after `observe`. Not called where there are no tensors."""
        del routing, hidden

    @abstractmethod
    def predict(self, sight: Sight) -> Iterable[Prediction]:
        """Return predictions, the nearest layer first and those of the next token last; empty where there are none.

        The result is read once and at once, and only as far as nearer layers miss nothing, so later predictions may be
        computed lazily.
        """
