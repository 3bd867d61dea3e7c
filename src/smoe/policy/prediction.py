"""What guesses the experts of later layers: when it is asked, what it may see, what it answers.

    one layer        | router | resident experts | wait for loads | missing experts |
    it is asked             ^ ROUTED             ^ RESIDENTS_DONE
                            | BESIDE: the answer is taken when it is there ............... |
                                | FIRST_DONE: the same, from the first expert on ......... |

Arrays are the engine's own (torch tensors there, nothing in a simulator), so this module need not know them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from smoe.policy.importance import ALL_IMPORTANT, Thresholds
from smoe.routing import Routing


class Moment(Enum):
    """When a predictor is asked."""

    ROUTED = "routed"
    """As soon as the layer's own router has spoken."""
    RESIDENTS_DONE = "residents done"
    """Once the layer's resident experts have been computed and others are waited for."""
    BESIDE = "beside the experts"
    """As soon as the layer's own router has spoken, while its experts are waited for and computed; what it names begins
    to load once it has answered. Only what looks at no part of the model, whose modules are the computing thread's."""
    FIRST_DONE = "beside the experts, loads behind the first"
    """The same, but what it names begins to load when the first of the experts is done (DuoServe-MoE, section 5.3)."""


ASKED = {"before": Moment.ROUTED, "beside": Moment.BESIDE, "first-expert": Moment.FIRST_DONE}
"""When predictors that see nothing but what routers have chosen are asked, by the setting `prefetch_asked`."""
ON_A_THREAD = (Moment.BESIDE, Moment.FIRST_DONE)


class Sight(NamedTuple):
    """What a predictor may look at."""

    layer: int
    hidden: Any
    """[T, H]: the layer's router input."""
    partial: Any = None
    """[T, H]: what the resident experts have given; None at `Moment.ROUTED`."""
    rows: Sequence[int] | None = None
    """Rows that will want something: no padding, no ended sequences. None: all."""


class Prediction(NamedTuple):
    """Experts that a later layer is expected to want."""

    layer: int
    experts: Sequence[int]
    """Best first."""
    low: Container[int] = frozenset()
    """Those whose predicted importance asks for no more than a low copy."""
    is_next: bool = False
    """Whether it is of the token after the one under way, whose own layers come first."""


class Listener(Protocol):
    """Gets predictions as soon as they are made, on any thread."""

    def expect(self, position: int, named: Prediction) -> None:
        """Expect these experts for the token at this position of the text."""

    def withdraw(self, position: int) -> None:
        """Predictions for this position, and for later ones, belonged to another text."""


class Predictor(ABC):
    """Guesses experts. Nothing that it does may be seen in the model's outputs."""

    asked = Moment.ROUTED
    alpha: float = 0.0
    """The substitution threshold that the layers are served with."""
    thresholds: Thresholds = ALL_IMPORTANT
    """What their missing experts of little importance come as."""
    helpers: Sequence[Any] = ()
    """What is to be closed with the engine: threads that hold neither it nor its model."""

    def install(self) -> None:
        """Listen to the model, once the engine has taken the experts' place in it."""

    def speak_to(self, listener: Listener) -> None:
        """Add a listener for predictions between two layers; only predictors with a thread make any."""
        del listener

    def begin(self, ids: Any, cache: Any) -> None:
        """A forward pass begins: its tokens [rows, new positions], None where their embeddings were given, and the
        cache that holds those before them, None where there is none."""
        del ids, cache

    def observe(self, routing: Routing) -> None:
        """Hear what a router has chosen, before anything is replaced: every layer of every step, in order."""
        del routing

    def overhear(self, routing: Routing, hidden: Any) -> None:
        """Observe that router's input, hidden [T, H], after `observe`. Not called where there are no tensors."""
        del routing, hidden

    @abstractmethod
    def predict(self, sight: Sight) -> Iterable[Prediction]:
        """The experts of later layers, the nearest layer first and those of the next token last; empty where there is
        nothing to say.

        Read once and at once, and only as far as the nearer layers miss nothing: what is further on may be worked out
        when it is asked for.
        """
