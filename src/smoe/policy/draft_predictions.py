"""The predictions of a draft model for the token that the model decodes and for the next one, passed on to a listener.

    model          x1 -> ............ -> x2 -> ......
    draft model       s1 | layer | layer    s2 | layer

The model decodes the tokens x1, x2 ..., and calls `ask` at the start of each. The draft model decodes s1, s2 ...
concurrently, layer by layer. Its predictions for s2 count if the model decodes the same token next; otherwise they are
withdrawn.

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
    """The experts that the draft model's router chose, best first, followed by the extra predictions."""
    scores: tuple[float, ...] = ()
    """The router's score of each expert; empty if another machine has made the prediction."""


class TokenStep(NamedTuple):
    """The step that decodes one token: the token, its position and its text."""

    token: int
    position: int
    text: Any
    """An identifier of the text: its KV cache, or a number."""


class DraftPredictions:
    """The predictions of one draft model. The caller holds a lock during each call."""

    def __init__(self) -> None:
        self.asked: TokenStep | None = None
        """The step that the model decodes now; None if no predictions are needed."""
        self._listener: Listener | None = None
        self._predicted: dict[TokenStep, dict[int, Expected]] = {}
        """Predictions by step and layer."""

    def __contains__(self, step: TokenStep) -> bool:
        """Return whether there are predictions of this step, because the draft model has started it."""
        return step in self._predicted

    def send_to(self, listener: Listener | None) -> None:
        """Pass every prediction to `listener` from now on, as soon as it is made; None: to no object."""
        self._listener = listener

    def rename_text(self, text: Any) -> None:
        """Record that the text which the model decodes now has the identifier `text`."""
        if self.asked is not None:
            self.asked = self.asked._replace(text=text)

    def ask(self, step: TokenStep) -> None:
        """Record the step that the model decodes now. If the draft model has not started it, earlier predictions are
        withdrawn."""
        self.asked = step
        if step not in self._predicted and self._listener is not None:
            self._listener.withdraw(step.position)

    def pause(self) -> None:
        """Drop all predictions, because the model computes something that the draft model does not follow, such as a
        prompt."""
        self.asked = None
        self._predicted.clear()

    def begin(self, step: TokenStep) -> None:
        """Record that the draft model starts `step`. Predictions are dropped, except those of the step that the model
        decodes."""
        self._predicted = {each: predicted for each, predicted in self._predicted.items() if each == self.asked} | {
            step: {}
        }

    def drop(self, step: TokenStep) -> None:
        """Drop the predictions of a step that the draft model has abandoned."""
        self._predicted.pop(step, None)

    def add(self, step: TokenStep, expected: Expected) -> bool:
        """Add the prediction for one layer of `step`. Return whether the model needs the prediction. It does not need
        it if it decodes another token, or if the step was dropped."""
        predicted, is_wanted = self._predicted.get(step), self.wants(step)
        if predicted is None:
            return False
        predicted[expected.layer] = expected
        if is_wanted and self._listener is not None:
            self._listener.expect(step.position, Prediction(expected.layer, expected.experts))
        return is_wanted

    def wants(self, step: TokenStep) -> bool:
        """Return whether the model decodes `step` now, or may decode it next."""
        asked = self.asked
        return asked is not None and (step == asked or self._is_after(step, asked))

    def predicted(self) -> tuple[list[Expected], list[Expected]]:
        """Return two lists of predictions so far: for the token that the model decodes now, and for the next token."""
        asked = self.asked
        if asked is None:
            return [], []
        after = next((predicted for step, predicted in self._predicted.items() if self._is_after(step, asked)), {})
        return list(self._predicted.get(asked, {}).values()), list(after.values())

    def forget(self) -> None:
        """Drop all predictions, because the draft model is no longer available."""
        self._predicted.clear()
        if self.asked is not None and self._listener is not None:
            self._listener.withdraw(self.asked.position)

    def _is_after(self, step: TokenStep, asked: TokenStep) -> bool:
        return step.position == asked.position + 1 and step.text == asked.text
