"""What a shadow has said of the token that the model decodes, and of the one after it; who is told of it at once.

    model    x1 -> ............ -> x2 -> ......      asked: a token at its place
    shadow      s1 | layer | layer    s2 | layer     said of x1; s2 is the next one where the model comes to it, else
                                                     what was said of it is withdrawn

Nothing here knows where the shadow runs: on a thread beside the model (`running_ahead.py`), or on another machine
(`cluster/following.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from smoe.policy.prediction import Listener, Prediction


class Expected(NamedTuple):
    """What a shadow says of one layer, for one token."""

    layer: int
    experts: tuple[int, ...]
    """Those that its own router chose, best first, and then the spares."""
    scores: tuple[float, ...] = ()
    """Of each, what the router ranks by; empty where it was said on another machine."""


class TokenStep(NamedTuple):
    """A token at its place in a text."""

    token: int
    position: int
    text: Any
    """What tells one text from another: its cache, or a number."""


class Hearsay:
    """Kept by whoever calls under a lock of its own."""

    def __init__(self) -> None:
        self.asked: TokenStep | None = None
        """What the model decodes; None while nobody wants to know."""
        self.listener: Listener | None = None
        """Hears everything at once."""
        self._said: dict[TokenStep, dict[int, Expected]] = {}
        """By layer."""

    def __contains__(self, step: TokenStep) -> bool:
        """Whether the shadow has begun with it."""
        return step in self._said

    def ask(self, step: TokenStep) -> None:
        """The model decodes this."""
        self.asked = step
        if step not in self._said and self.listener is not None:
            self.listener.withdraw(step.position)

    def pause(self) -> None:
        """The model does something that no shadow follows."""
        self.asked = None
        self._said.clear()

    def begin(self, step: TokenStep) -> None:
        """The shadow decodes this; what it said of others than the model's token is of no use any more."""
        self._said = {each: said for each, said in self._said.items() if each == self.asked} | {step: {}}

    def drop(self, step: TokenStep) -> None:
        """The shadow has given this up."""
        self._said.pop(step, None)

    def add(self, step: TokenStep, expected: Expected) -> bool:
        """It says something of a step that it has begun; returns whether that is wanted."""
        said, is_wanted = self._said.get(step), self.wants(step)
        if said is None:
            return False
        said[expected.layer] = expected
        if is_wanted and self.listener is not None:
            self.listener.expect(step.position, Prediction(expected.layer, expected.experts))
        return is_wanted

    def wants(self, step: TokenStep) -> bool:
        """Whether the model decodes it, or may come to it next."""
        asked = self.asked
        return asked is not None and (step == asked or self._is_after(step, asked))

    def said(self) -> tuple[list[Expected], list[Expected]]:
        """(what is expected of the token that the model decodes, as far as it has been said; of the one after it)."""
        asked = self.asked
        if asked is None:
            return [], []
        after = next((said for step, said in self._said.items() if self._is_after(step, asked)), {})
        return list(self._said.get(asked, {}).values()), list(after.values())

    def forget(self) -> None:
        """Nobody who has said anything is there any more."""
        self._said.clear()
        if self.asked is not None and self.listener is not None:
            self.listener.withdraw(self.asked.position)

    def _is_after(self, step: TokenStep, asked: TokenStep) -> bool:
        return step.position == asked.position + 1 and step.text == asked.text
