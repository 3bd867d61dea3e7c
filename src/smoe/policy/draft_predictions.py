"""A draft model's predictions for the token that the model decodes and for the next one, passed on to a listener.

    model        x1 -> ............ -> x2 -> ......      asked: a token at its position
    draft model     s1 | layer | layer    s2 | layer     predictions for x1; those for s2 count if
                                                         the model decodes s2 next, else are withdrawn

This module does not depend on where the draft model runs: on a thread of the model's process (`running_ahead.py`), or
on another machine (`cluster/following.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from smoe.policy.prediction import Listener, Prediction


class Expected(NamedTuple):
    """A draft model's prediction for one layer of one token."""

    layer: int
    experts: tuple[int, ...]
    """The experts that the draft model's router chose, best first, then the extra predictions."""
    scores: tuple[float, ...] = ()
    """The router's score of each expert; empty for a prediction of another machine."""


class TokenStep(NamedTuple):
    """A token at its position in a text."""

    token: int
    position: int
    text: Any
    """Identifies the text: its cache, or a number."""


class DraftPredictions:
    """The predictions of one draft model. The caller protects it with a lock."""

    def __init__(self) -> None:
        self.asked: TokenStep | None = None
        """The step that the model decodes; None: no predictions are needed."""
        self.listener: Listener | None = None
        """Receives every prediction at once."""
        self._predicted: dict[TokenStep, dict[int, Expected]] = {}
        """Predictions by step and layer."""

    def __contains__(self, step: TokenStep) -> bool:
        """Return whether the draft model has started this step."""
        return step in self._predicted

    def ask(self, step: TokenStep) -> None:
        """Record the step that the model decodes."""
        self.asked = step
        if step not in self._predicted and self.listener is not None:
            self.listener.withdraw(step.position)

    def pause(self) -> None:
        """Stop predictions: the model does something that no draft model follows."""
        self.asked = None
        self._predicted.clear()

    def begin(self, step: TokenStep) -> None:
        """Record that the draft model starts a step; predictions for other steps than this and the model's are
        dropped."""
        self._predicted = {each: predicted for each, predicted in self._predicted.items() if each == self.asked} | {
            step: {}
        }

    def drop(self, step: TokenStep) -> None:
        """Drop a step that the draft model has given up."""
        self._predicted.pop(step, None)

    def add(self, step: TokenStep, expected: Expected) -> bool:
        """Add a prediction for a started step. Return whether it is needed."""
        predicted, is_wanted = self._predicted.get(step), self.wants(step)
        if predicted is None:
            return False
        predicted[expected.layer] = expected
        if is_wanted and self.listener is not None:
            self.listener.expect(step.position, Prediction(expected.layer, expected.experts))
        return is_wanted

    def wants(self, step: TokenStep) -> bool:
        """Return whether the model decodes this step, or may decode it next."""
        asked = self.asked
        return asked is not None and (step == asked or self._is_after(step, asked))

    def predicted(self) -> tuple[list[Expected], list[Expected]]:
        """Return (predictions so far for the token that the model decodes; for the next token)."""
        asked = self.asked
        if asked is None:
            return [], []
        after = next((predicted for step, predicted in self._predicted.items() if self._is_after(step, asked)), {})
        return list(self._predicted.get(asked, {}).values()), list(after.values())

    def forget(self) -> None:
        """Drop all predictions: the draft model has gone."""
        self._predicted.clear()
        if self.asked is not None and self.listener is not None:
            self.listener.withdraw(self.asked.position)

    def _is_after(self, step: TokenStep, asked: TokenStep) -> bool:
        return step.position == asked.position + 1 and step.text == asked.text
