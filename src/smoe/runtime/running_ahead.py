"""Runs a draft model on a thread: it decodes the same token as the model, concurrently, and possibly the next one.

One token, time to the right. x1, x2 are the model's tokens; s2 is the draft model's guess of x2:

    model        x1 -> layer . wait . | layer . wait . | ... -> x2 -> layer . wait . | ...
    draft model  x1 -> layer | layer | ... -> s2 -> layer | layer | ...        if s2 = x2: already predicted
                                           |     `- if s2 is not x2: cancelled and removed, then x2 is decoded
                                           `- or waits for x2 (OD-MoE's late departure, section 3.2)

The draft model is aligned at every token (in the paper's notation T1 KV1): within one machine, passing the token and
copying its keys and values costs almost nothing. The position that is decoded ahead is aligned one token later.
Predictions only decide what is loaded early, so their timing does not affect the text.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any, Protocol

from smoe.bounds import DEPARTURE
from smoe.errors import EngineStateError, GenerationCancelledError
from smoe.models.kv_cache import RowCache
from smoe.policy.draft_predictions import DraftPredictions, Expected, TokenStep
from smoe.policy.prediction import Listener, Prediction, Predictor, Sight
from smoe.runtime.draft_model import Draft

_log = logging.getLogger(__name__)


class RunningAhead:
    """A thread on which a draft model runs. Only the model's thread calls `begin` and `predicted`; `close` ends the
    thread."""

    def __init__(
        self,
        draft: Draft,
        departure: str = DEPARTURE[0],
        on_prediction: Callable[[TokenStep, Expected], None] = lambda *_: None,
    ) -> None:
        """`departure`: one of `DEPARTURE`. `on_prediction` receives each prediction, on the draft model's thread."""
        self._draft = draft
        self._at_once = departure == "at-once"
        self._on_prediction = on_prediction
        self._changed = threading.Condition()
        self._draft_predictions = DraftPredictions()
        self._decoding: TokenStep | None = None
        """The step that the draft model decodes, or has decoded last."""
        self._is_done = True
        """Whether that step has ended."""
        self._unchanged = inf
        """The number of leading positions that have not been written again since the last step."""
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def send_to(self, listener: Listener) -> None:
        """Make `listener` receive every prediction as soon as it is made."""
        self._draft_predictions.send_to(listener)

    def begin(self, token: int, cache: RowCache) -> None:
        """Start to decode `token` with the draft model. It follows the tokens in the model's `cache`."""
        asked = TokenStep(token, cache.length, cache)
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="smoe-draft", daemon=True)
                self._thread.start()
            self._draft_predictions.ask(asked)
            self._cancel_unless(asked)
            self._changed.notify_all()

    def pause(self, cache: RowCache | None = None) -> None:
        """Stop predicting, because the model reads a prompt (after the tokens in `cache`) or decodes a batch."""
        with self._changed:
            self._draft_predictions.pause()
            self._cancel_unless(None)
            if cache is not None:
                self._unchanged = min(self._unchanged, cache.length)

    def predicted(self) -> tuple[list[Expected], list[Expected]]:
        """Return two lists of predictions that have been made: those for the token that the model is decoding, and
        those for the token after it."""
        with self._changed:
            return self._draft_predictions.predicted()

    def wait(self, seconds: float) -> bool:
        """Wait until all predictions of the current step are made. Return False if that takes longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_idle, seconds)

    def close(self) -> None:
        """End the thread and the draft model's engine. Repeated calls have no effect."""
        with self._changed:
            self._is_ending = True
            self._draft_predictions.send_to(None)
            self._cancel_unless(None)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._draft.text.engine.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self._is_ending or (self._is_done and self._next() is None)

    def _next(self) -> TokenStep | None:
        """Return the step that the draft model should decode next, or None if it should wait."""
        asked, last = self._draft_predictions.asked, self._decoding
        if asked is None:
            return None
        if asked not in self._draft_predictions:
            return asked
        own = self._draft.text.next_token
        if self._at_once and last == asked and self._is_done and asked.position + 1 < asked.text.capacity_tokens:
            return TokenStep(own, asked.position + 1, asked.text)
        return None

    def _cancel_unless(self, wanted: TokenStep | None) -> None:
        """Cancel the running step of the draft model unless it equals `wanted`."""
        if not self._is_done and self._decoding != wanted:
            self._draft.text.engine.cancel()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_ending or self._next() is not None)
                step = self._next()
                if self._is_ending or step is None:
                    return
                self._draft_predictions.begin(step)
                self._decoding, self._is_done = step, False
                unchanged, self._unchanged = self._unchanged, inf
            try:
                self._draft.unlearn(unchanged)
                self._draft.follow(step.token, step.position, step.text, partial(self._say, step))
            except GenerationCancelledError:
                with self._changed:
                    self._draft_predictions.drop(step)
            except EngineStateError as error:
                _log.debug("the draft model can no longer follow this text: %s", error)  # its cache was invalidated
            except Exception as error:
                _log.warning(
                    "the draft model failed and makes no more predictions; generation continues without them: %s", error
                )
                return
            finally:
                with self._changed:
                    self._is_done = True

    def _say(self, step: TokenStep, expected: Expected) -> None:
        with self._changed:
            is_wanted = self._draft_predictions.add(step, expected)
        if is_wanted:
            self._on_prediction(step, expected)


class Ahead(Protocol):
    """A draft model that follows the model's text, on this or another machine. The model's thread calls its methods;
    `close` ends the draft model."""

    def send_to(self, listener: Listener) -> None:
        """Make `listener` receive every prediction as soon as it is made, on any thread."""

    def begin(self, token: int, cache: RowCache) -> None:
        """Start to decode `token` with the draft model. It follows the tokens in the model's `cache`."""

    def pause(self, cache: RowCache | None = None) -> None:
        """Stop predicting, because the model reads a prompt (after the tokens in `cache`) or decodes a batch."""

    def predicted(self) -> tuple[list[Expected], list[Expected]]:
        """Return two lists of predictions that have been made: those for the token that the model is decoding, and
        those for the token after it."""

    def close(self) -> None: ...


class DraftRouting(Predictor):
    """Predicts the experts that a draft model's routers have chosen, for the current token and then for the next one.

    For a batch of several sequences it predicts nothing.
    """

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead
        self.helpers = (ahead,)

    def begin(self, ids: Any, cache: Any) -> None:
        if ids is None or cache is None or tuple(ids.shape) != (1, 1):
            self.ahead.pause(cache if cache is not None and cache.rows == 1 else None)
        else:
            self.ahead.begin(int(ids), cache)

    def speak_to(self, listener: Listener) -> None:
        self.ahead.send_to(listener)

    def predict(self, sight: Sight) -> Iterator[Prediction]:
        now, after = self.ahead.predicted()
        for expected in now:
            if expected.layer > sight.layer:
                yield Prediction(expected.layer, expected.experts)
        for expected in after:
            yield Prediction(expected.layer, expected.experts, is_next=True)
