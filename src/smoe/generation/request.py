"""Requests to the decode loop, and the events that the loop reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from smoe.generation.prompt_images import PromptImages
from smoe.generation.sampling_settings import Sampling


class Constraint(Protocol):
    """An object that decides which tokens may come next in one text, such as a grammar."""

    def narrow(self, logits: torch.Tensor) -> None:
        """Set `logits` [V] of forbidden tokens to minus infinity, in place."""

    def take(self, token: int) -> None:
        """Record the token that was chosen."""


class Likely(NamedTuple):
    """One of the most probable tokens, with its log probability."""

    token: int
    logprob: float


class Piece(NamedTuple):
    """The event that one token of a text was generated."""

    token: int
    text: str
    """The new text that may be shown. It is empty while a character is incomplete or a stop string may have begun."""
    logprob: float | None
    """The natural logarithm of the token's probability, from the model's unchanged logits; None if it was not
    requested."""
    top: tuple[Likely, ...] = ()
    """The most probable tokens, best first, as many as were requested."""


class EndReason(Enum):
    """The reason why a text has ended."""

    LENGTH = "length"
    END = "end"
    """The model chose its end token."""
    STOP = "stop"
    """A stop string was found."""
    CANCELLED = "cancelled"
    FAILED = "failed"


class End(NamedTuple):
    """The last event of a request."""

    reason: EndReason
    text: str
    """The rest of the text, which no earlier event contains."""
    error: Exception | None = None
    """The error, if the reason is `FAILED`."""


Receive = Callable[[Piece | End], None]


@dataclass(eq=False)
class Request:
    """One text to continue. The caller creates it; the loop sets the fields after `has_enough`."""

    ids: Sequence[int]
    """The prompt's tokens; at least one."""
    sampling: Sampling
    receive: Receive
    """A function that the loop calls with every token and with the end, on its own thread; it must return at once."""
    logprobs: int | None = None
    """How many of the most probable tokens are reported with each token. 0: only the chosen token's probability; None:
    no probabilities."""
    constraint: Constraint | None = None
    images: PromptImages | None = None
    """The images of the prompt; None if it has none."""
    is_cancelled: bool = False
    """Any thread may set this; the request then ends before the next step."""
    has_enough: bool = False
    """Any thread may set this if the text is complete; it then ends before the next step, as at a stop string."""
    # set by the loop
    reused_tokens: int = 0
    """The number of prompt tokens that were reused from the KV cache."""
    new_ids: list[int] = field(default_factory=list)
    asked: float = 0.0
    """The time at which the request was queued, in seconds of the engine's clock."""
    begun: float = 0.0
    """The time at which the request's prefill began, in seconds of the engine's clock."""
    first: float = 0.0
    """The time of the request's first token, in seconds of the engine's clock."""
    ended: float = 0.0
    """The time at which the request ended, in seconds of the engine's clock."""
    state: Any = None
    """The text that the loop makes of this request. Only the loop may use it."""
