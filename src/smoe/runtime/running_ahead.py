"""A shadow on a thread of its own, which decodes the model's token while the model does, and maybe the next one too.

One token, time to the right:

    model    x1 -> layer . wait . | layer . wait . | ... -> x2 -> layer . wait . | ...
    shadow   x1 -> layer | layer | ... -> s2 -> layer | layer | ...      s2 = x2: predicted already
                                       |     `- s2 is not x2: cancelled, taken back, and x2 decoded
                                       `- or waits for x2 (OD-MoE's late departure, section 3.2)

Every token is aligned (T1 KV1): within one machine telling it the token and copying its keys and values costs nothing.
Those of the position that it decodes ahead are aligned one token late. What it says decides nothing but what is loaded
early, so when it says it is of no consequence for the text.
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
from smoe.runtime.shadow import Shadow

_log = logging.getLogger(__name__)


class RunningAhead:
    """A thread that a shadow runs on. `begin` and `said` belong to the model's thread; `close` ends it."""

    def __init__(
        self,
        shadow: Shadow,
        departure: str = DEPARTURE[0],
        on_said: Callable[[TokenStep, Expected], None] = lambda *_: None,
    ) -> None:
        """`departure`: one of `DEPARTURE`; `on_said` gets predictions, on the thread."""
        self._shadow = shadow
        self._at_once = departure == "at-once"
        self._on_said = on_said
        self._changed = threading.Condition()
        self._draft_predictions = DraftPredictions()
        self._decoding: TokenStep | None = None
        """What the shadow decodes, or has decoded last."""
        self._is_done = True
        """Whether it has."""
        self._unchanged = inf
        """Positions that were not written again since the last step."""
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def tell(self, listener: Listener) -> None:
        """It hears everything at once."""
        self._draft_predictions.listener = listener

    def begin(self, token: int, cache: RowCache) -> None:
        """The model decodes this token behind what is in its cache."""
        asked = TokenStep(token, cache.length, cache)
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="smoe-shadow", daemon=True)
                self._thread.start()
            self._draft_predictions.ask(asked)
            self._cancel_unless(asked)
            self._changed.notify_all()

    def pause(self, cache: RowCache | None = None) -> None:
        """The model does something that no shadow follows: a prompt, behind what is in this cache, or a batch."""
        with self._changed:
            self._draft_predictions.pause()
            self._cancel_unless(None)
            if cache is not None:
                self._unchanged = min(self._unchanged, cache.length)

    def said(self) -> tuple[list[Expected], list[Expected]]:
        """(what is expected of the token that the model decodes, as far as it has been said; of the one after it)."""
        with self._changed:
            return self._draft_predictions.said()

    def wait(self, seconds: float) -> bool:
        """Wait until all predictions of the begun step are there; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_idle, seconds)

    def close(self) -> None:
        """End the thread and the shadow's engine; any number of times."""
        with self._changed:
            self._is_ending = True
            self._draft_predictions.listener = None
            self._cancel_unless(None)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._shadow.text.engine.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self._is_ending or (self._is_done and self._next() is None)

    def _next(self) -> TokenStep | None:
        """What is to be decoded now; None: nothing."""
        asked, last = self._draft_predictions.asked, self._decoding
        if asked is None:
            return None
        if asked not in self._draft_predictions:
            return asked
        own = self._shadow.text.next_token
        if self._at_once and last == asked and self._is_done and asked.position + 1 < asked.text.capacity_tokens:
            return TokenStep(own, asked.position + 1, asked.text)
        return None

    def _cancel_unless(self, wanted: TokenStep | None) -> None:
        """End the step under way where it is of no use any more."""
        if not self._is_done and self._decoding != wanted:
            self._shadow.text.engine.cancel()

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
                self._shadow.unlearn(unchanged)
                self._shadow.follow(step.token, step.position, step.text, partial(self._say, step))
            except GenerationCancelledError:
                with self._changed:
                    self._draft_predictions.drop(step)
            except EngineStateError as error:
                _log.debug("the draft model can no longer follow this text: %s", error)  # its cache has been given up
            except Exception as error:
                _log.warning("the draft model failed and predicts nothing any more: %s", error)
                return
            finally:
                with self._changed:
                    self._is_done = True

    def _say(self, step: TokenStep, expected: Expected) -> None:
        with self._changed:
            is_wanted = self._draft_predictions.add(step, expected)
        if is_wanted:
            self._on_said(step, expected)


class Ahead(Protocol):
    """A shadow that follows the model's text, wherever it runs. What the model's thread calls; `close` ends it."""

    def tell(self, listener: Listener) -> None:
        """It hears everything at once, on whosever thread that is."""

    def begin(self, token: int, cache: RowCache) -> None:
        """The model decodes this token behind what is in its cache."""

    def pause(self, cache: RowCache | None = None) -> None:
        """The model does something that no shadow follows: a prompt, behind what is in this cache, or a batch."""

    def said(self) -> tuple[list[Expected], list[Expected]]:
        """(what is expected of the token that the model decodes, as far as it has been said; of the one after it)."""

    def close(self) -> None: ...


class ShadowRouting(Predictor):
    """Names what a shadow's routers have chosen so far for the token under way, and then for the next one.

    Where several sequences are decoded together it says nothing.
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
        self.ahead.tell(listener)

    def predict(self, sight: Sight) -> Iterator[Prediction]:
        now, after = self.ahead.said()
        for expected in now:
            if expected.layer > sight.layer:
                yield Prediction(expected.layer, expected.experts)
        for expected in after:
            yield Prediction(expected.layer, expected.experts, is_next=True)
