"""What is asked of the decode loop, and what it says while it works on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from smoe.generation.sampling import Sampling


class Constraint(Protocol):
    """Which tokens may come next: a grammar. One object for one text."""

    def narrow(self, logits: torch.Tensor) -> None:
        """Make `logits` [V] of tokens that may not come next minus infinity, in place."""

    def take(self, token: int) -> None:
        """This one came."""


class Likely(NamedTuple):
    """A token that could have been chosen."""

    token: int
    logprob: float


class Piece(NamedTuple):
    """One more token."""

    token: int
    text: str
    """What may be shown now: empty while a character is half there or a stop string may have begun."""
    logprob: float | None
    """Natural logarithm of its probability, by the model's own logits; None: not requested."""
    top: tuple[Likely, ...] = ()
    """The likeliest tokens, best first: as many as were asked for."""


class EndReason(Enum):
    """Why a text has ended."""

    LENGTH = "length"
    END = "end"
    """The model's end token."""
    STOP = "stop"
    """A stop string."""
    CANCELLED = "cancelled"
    FAILED = "failed"


class End(NamedTuple):
    """The last event of a request."""

    reason: EndReason
    text: str
    """What was held back until now."""
    error: Exception | None = None
    """The error, with `FAILED`."""


Hear = Callable[[Piece | End], None]


@dataclass(eq=False)
class Request:
    """One text to continue. Made by the caller; the loop fills in the rest."""

    ids: Sequence[int]
    """The prompt's tokens: one at least."""
    sampling: Sampling
    hear: Hear
    """Called by the loop's thread, for every token and at the end; must return at once."""
    logprobs: int | None = None
    """How many likeliest tokens to report with each; 0: the chosen one's probability alone; None: nothing."""
    constraint: Constraint | None = None
    is_cancelled: bool = False
    """Set it from any thread: the request ends before the next step."""
    has_enough: bool = False
    """Set it from any thread: what is wanted has come, and the text ends before the next step, as at a stop string."""
    # the loop's
    reused_tokens: int = 0
    """Prompt tokens that need not be read, as another text began with them."""
    new_ids: list[int] = field(default_factory=list)
    asked: float = 0.0
    """Moments on the engine's clock: when it was handed in,"""
    begun: float = 0.0
    """its reading began,"""
    first: float = 0.0
    """its first token was there,"""
    ended: float = 0.0
    """and its last."""
    state: Any = None
    """The loop's own."""
