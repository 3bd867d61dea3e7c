"""A draft model's predictions for the token that the model decodes, and for the one after it; listeners get them.

    model    x1 -> ............ -> x2 -> ......      asked: a token at its place
    shadow      s1 | layer | layer    s2 | layer     for x1; s2 is the next one where the model comes to it, else
                                                     its predictions are withdrawn

Nothing here knows where the draft model runs: on a thread of the model's process (`running_ahead.py`), or on another
machine (`cluster/following.py`).
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
    """The router's value of each; empty for a prediction of another machine."""


class TokenStep(NamedTuple):
    """A token at its place in a text."""

    token: int
    position: int
    text: Any
    """What tells one text from another: its cache, or a number."""


class DraftPredictions:
    """The caller protects it by a lock."""

    def __init__(self) -> None:
        self.asked: TokenStep | None = None
        """The step that the model decodes; None: no predictions are needed."""
        self.listener: Listener | None = None
        """Hears everything at once."""
        self._predicted: dict[TokenStep, dict[int, Expected]] = {}
        """Predictions by layer."""

    def __contains__(self, step: TokenStep) -> bool:
        """Whether the shadow has begun with it."""
        return step in self._predicted

    def ask(self, step: TokenStep) -> None:
        """The model decodes this."""
        self.asked = step
        if step not in self._predicted and self.listener is not None:
            self.listener.withdraw(step.position)

    def pause(self) -> None:
        """The model does something that no shadow follows."""
        self.asked = None
        self._predicted.clear()

    def begin(self, step: TokenStep) -> None:
        """The draft model decodes this; its predictions for other tokens than the model's are dropped."""
        self._predicted = {each: predicted for each, predicted in self._predicted.items() if each == self.asked} | {
            step: {}
        }

    def drop(self, step: TokenStep) -> None:
        """The shadow has given this up."""
        self._predicted.pop(step, None)

    def add(self, step: TokenStep, expected: Expected) -> bool:
        """It says something of a step that it has begun; returns whether that is wanted."""
        predicted, is_wanted = self._predicted.get(step), self.wants(step)
        if predicted is None:
            return False
        predicted[expected.layer] = expected
        if is_wanted and self.listener is not None:
            self.listener.expect(step.position, Prediction(expected.layer, expected.experts))
        return is_wanted

    def wants(self, step: TokenStep) -> bool:
        """Whether the model decodes it, or may come to it next."""
        asked = self.asked
        return asked is not None and (step == asked or self._is_after(step, asked))

    def said(self) -> tuple[list[Expected], list[Expected]]:
        """(predictions for the token that the model decodes, so far; for the one after it)."""
        asked = self.asked
        if asked is None:
            return [], []
        after = next((predicted for step, predicted in self._predicted.items() if self._is_after(step, asked)), {})
        return list(self._predicted.get(asked, {}).values()), list(after.values())

    def forget(self) -> None:
        """The draft model has gone: drop all its predictions."""
        self._predicted.clear()
        if self.asked is not None and self.listener is not None:
            self.listener.withdraw(self.asked.position)

    def _is_after(self, step: TokenStep, asked: TokenStep) -> bool:
        return step.position == asked.position + 1 and step.text == asked.text
