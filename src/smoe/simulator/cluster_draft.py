"""The draft model of a simulated cluster: a copy of the model in fewer bits that runs ahead and predicts experts.

    coordinator  | token n ......................................... | token n + 1 ...........
    late                       token n + 1 and its keys and values     |----> S S S S S S
    early        S S S S S S (n + 1, from its own token) S S          right: continues; wrong: |-> S S S S S S

Each S is one layer of the draft model. *Late*, as in the paper: the draft model starts a token when everything that is
due (token, keys and values) has arrived. If nothing is due, it starts at the same time as the coordinator. *Early*,
ours: as soon as it is free, it starts the next token from its own prediction of that token, at most one token ahead. If
the coordinator decodes another token, it starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from smoe.simulator.events import Events


@dataclass(frozen=True)
class DraftTimes:
    """The times of a draft model in seconds, and when it starts."""

    layer: float
    """Seconds that the draft model takes for a layer."""
    is_early: bool = False
    """Whether the draft model starts early. Keys and values are then sent when the port is free, and not waited for."""


class SimulatedDraft:
    """A simulated draft model. After each layer it calls `says` with (token, layer, whether its own token was right).
    It calls `unsays` with a token whose predictions are withdrawn."""

    def __init__(
        self,
        events: Events,
        times: DraftTimes,
        layers: int,
        own_is_right: Sequence[bool],
        says: Callable[[int, int, bool], None],
        unsays: Callable[[int], None],
    ) -> None:
        """`own_is_right`: for each token, whether the token that the draft model decodes itself equals the token that
        the coordinator decodes."""
        self.passes: list[tuple[float, int, int]] = []
        """(time, token, layer) of each layer that the draft model has begun."""
        self._events, self._times, self._layers = events, times, layers
        self._own_is_right, self._says, self._unsays = own_is_right, says, unsays
        self._last_sent = -1
        """The last token for which the draft model has received the data from the coordinator that it must wait for."""
        self._next = 0
        self._attempt = 0
        self._under_way: int | None = None
        self._is_right = True

    def reach(self, token: int) -> None:
        """Record that the coordinator has reached this token, and that the token, keys and values that are due have
        arrived at the draft model."""
        self._last_sent = token
        begun = self._next - 1
        if begun == token and token > 0 and not self._own_is_right[token]:
            self._unsays(token)
            self._next, self._under_way = token, None
        self._go_on()

    def _go_on(self) -> None:
        if self._under_way is not None:
            return
        ahead = 1 if self._times.is_early else 0
        if self._next <= self._last_sent + ahead and self._next < len(self._own_is_right):
            self._under_way = token = self._next
            self._is_right = token <= self._last_sent or self._own_is_right[token]
            self._next += 1
            self._attempt += 1
            self._layer(self._attempt, token, 0)

    def _layer(self, attempt: int, token: int, layer: int) -> None:
        self.passes.append((self._events.now, token, layer))
        self._events.at(self._events.now + self._times.layer, partial(self._done, attempt, token, layer))

    def _done(self, attempt: int, token: int, layer: int) -> None:
        if attempt != self._attempt or self._under_way is None:
            return  # superseded by another attempt
        self._says(token, layer, self._is_right)
        if layer + 1 < self._layers:
            self._layer(attempt, token, layer + 1)
        else:
            self._under_way = None
            self._go_on()
