"""Requests to the decode loop, and the events that it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from smoe.generation.sampling import Sampling


class Constraint(Protocol):
    """Decides which tokens may come next in one text, such as a grammar."""

    def narrow(self, logits: torch.Tensor) -> None:
        """Set `logits` [V] of forbidden tokens to minus infinity, in place."""

    def take(self, token: int) -> None:
        """Record the chosen token."""


class Likely(NamedTuple):
    """One of the likeliest tokens, with its log probability."""

    token: int
    logprob: float


class Piece(NamedTuple):
    """The event of one new token."""

    token: int
    text: str
    """New text that may be shown: empty while a character is incomplete or a stop string may have begun."""
    logprob: float | None
    """The natural logarithm of its probability, by the model's own logits; None: not requested."""
    top: tuple[Likely, ...] = ()
    """The likeliest tokens, best first, as many as requested."""


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
    """Text that was withheld until now."""
    error: Exception | None = None
    """The error, with `FAILED`."""


Receive = Callable[[Piece | End], None]


@dataclass(eq=False)
class Request:
    """One text to continue. The caller makes it; the loop fills in the fields after `has_enough`."""

    ids: Sequence[int]
    """The prompt's tokens; at least one."""
    sampling: Sampling
    receive: Receive
    """A function that receives every token and the end, on the loop's thread; it must return at once."""
    logprobs: int | None = None
    """The number of likeliest tokens to report with each token; 0: the chosen token's probability only; None: no
    probabilities."""
    constraint: Constraint | None = None
    is_cancelled: bool = False
    """Set by any thread: the request ends before the next step."""
    has_enough: bool = False
    """Set by any thread: the text is complete and ends before the next step, as at a stop string."""
    # set by the loop
    reused_tokens: int = 0
    """Prompt tokens that were reused from the KV cache."""
    new_ids: list[int] = field(default_factory=list)
    asked: float = 0.0
    """The time when the request was queued, in seconds of the engine's clock."""
    begun: float = 0.0
    """The time when its prefill began."""
    first: float = 0.0
    """The time of its first token."""
    ended: float = 0.0
    """The time of its end."""
    state: Any = None
    """Private to the loop."""
