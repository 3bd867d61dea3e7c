"""A shadow on a thread of its own, which decodes the model's token while the model does, and maybe the next one too.

One token, time to the right:

    model    x1 -> layer . wait . | layer . wait . | ... -> x2 -> layer . wait . | ...
    shadow   x1 -> layer | layer | ... -> s2 -> layer | layer | ...      s2 = x2: it has been said already
                                       |     `- s2 is not x2: cancelled, taken back, and x2 decoded
                                       `- or waits for x2 (OD-MoE's late departure, section 3.2)

Every token is aligned (T1 KV1): within one machine telling it the token and copying its keys and values costs nothing.
Those of the position that it decodes ahead are aligned one token late. What it says decides nothing but what is loaded
early, so when it says it is of no consequence for the text.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from smoe.bounds import DEPARTURE
from smoe.errors import EngineStateError, GenerationCancelledError
from smoe.models.kv_cache import RowCache
from smoe.policy.prediction import Listener, Prediction, Predictor, Sight
from smoe.runtime.shadow import Expected, Shadow

_log = logging.getLogger(__name__)


class _Step(NamedTuple):
    """A token at its place in the text of one cache."""

    token: int
    position: int
    cache: RowCache


class RunningAhead:
    """A thread that a shadow runs on. `begin` and `said` belong to the model's thread; `close` ends it."""

    def __init__(self, shadow: Shadow, departure: str = DEPARTURE[0]) -> None:
        """`departure`: one of `DEPARTURE`."""
        self._shadow = shadow
        self._at_once = departure == "at-once"
        self._changed = threading.Condition()
        self._asked: _Step | None = None
        """What the model decodes; None while nobody wants to know."""
        self._decoding: _Step | None = None
        """What the shadow decodes, or has decoded last."""
        self._is_done = True
        """Whether it has."""
        self._said: dict[_Step, list[Expected]] = {}
        self.listener: Listener | None = None
        """Hears everything at once."""
        self._is_ending = False
        self._thread: threading.Thread | None = None

    def begin(self, token: int, cache: RowCache) -> None:
        """The model decodes this token behind what is in its cache."""
        asked = _Step(token, cache.length, cache)
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="smoe-shadow", daemon=True)
                self._thread.start()
            self._asked = asked
            if asked not in self._said and self.listener is not None:
                self.listener.withdraw(asked.position)
            self._cancel_unless(asked)
            self._changed.notify_all()

    def pause(self) -> None:
        """The model does something that no shadow follows: a prompt, a batch."""
        with self._changed:
            self._asked = None
            self._cancel_unless(None)

    def said(self) -> tuple[list[Expected], list[Expected]]:
        """(what is expected of the token that the model decodes, as far as it has been said; of the one after it)."""
        with self._changed:
            asked, last = self._asked, self._decoding
            if asked is None:
                return [], []
            is_after = last is not None and last.position == asked.position + 1 and last.cache is asked.cache
            after = self._said.get(last, ()) if is_after and last is not None else ()
            return list(self._said.get(asked, ())), list(after)

    def wait(self, seconds: float) -> bool:
        """Until it has said all that it will say of what was begun; False where that takes longer. For tests."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_idle, seconds)

    def close(self) -> None:
        """End the thread and the shadow's engine; any number of times."""
        with self._changed:
            self._is_ending = True
            self._cancel_unless(None)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._shadow.text.engine.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return self._is_ending or (self._is_done and self._next() is None)

    def _next(self) -> _Step | None:
        """What is to be decoded now; None: nothing."""
        asked, last = self._asked, self._decoding
        if asked is None:
            return None
        if asked not in self._said:
            return asked
        own = self._shadow.text.next_token
        if self._at_once and last == asked and self._is_done and asked.position + 1 < asked.cache.capacity_tokens:
            return _Step(own, asked.position + 1, asked.cache)
        return None

    def _cancel_unless(self, wanted: _Step | None) -> None:
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
                self._begin(step)
            try:
                self._shadow.follow(step.token, step.position, step.cache, partial(self._say, step))
            except GenerationCancelledError:
                with self._changed:
                    self._said.pop(step)
            except EngineStateError as error:
                _log.debug("the shadow cannot follow this text any more: %s", error)  # its cache has been given up
            except Exception as error:
                _log.warning("the shadow has failed and says nothing any more: %s", error)
                return
            finally:
                with self._changed:
                    self._is_done = True

    def _say(self, step: _Step, expected: Expected) -> None:
        self._said[step].append(expected)
        with self._changed:
            listener, is_wanted = self.listener, not self._is_ending and self._is_of(step)
            if listener is not None and is_wanted:
                listener.expect(step.position, Prediction(expected.layer, expected.experts))

    def _is_of(self, step: _Step) -> bool:
        """Whether the model decodes it, or may come to it next."""
        asked = self._asked
        return asked is not None and (step == asked or step.position == asked.position + 1)

    def _begin(self, step: _Step) -> None:
        before = self._asked
        self._said = {each: said for each, said in self._said.items() if each == before} | {step: []}
        self._decoding, self._is_done = step, False


class ShadowRouting(Predictor):
    """Names what a shadow's routers have chosen so far for the token under way, and then for the next one.

    Where several sequences are decoded together it says nothing.
    """

    def __init__(self, ahead: RunningAhead) -> None:
        self._ahead = ahead
        self.helpers = (ahead,)

    def begin(self, ids: Any, cache: Any) -> None:
        if ids is None or cache is None or tuple(ids.shape) != (1, 1):
            self._ahead.pause()
        else:
            self._ahead.begin(int(ids), cache)

    def speak_to(self, listener: Listener) -> None:
        self._ahead.listener = listener

    def predict(self, sight: Sight) -> Iterator[Prediction]:
        now, after = self._ahead.said()
        for expected in now:
            if expected.layer > sight.layer:
                yield Prediction(expected.layer, expected.experts)
        for expected in after:
            yield Prediction(expected.layer, expected.experts, is_next=True)
