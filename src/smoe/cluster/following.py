"""The coordinator's side of a draft model on another machine: what to send next, and the predictions received.

    model's thread    begin: a token at its position   pause: a prompt, a batch     predicted: predictions so far
    link's thread     next_message: missing keys and values, in parts, then the token     receive: predicted experts

Only the newest token is sent. An older token that was not sent in time is useless, because the model has decoded it
already. Keys and values are sent once, and again from the position to which the text was rewound. Predictions decide
only what is loaded early.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from smoe.cluster import draft_frames
from smoe.cluster.draft_frames import PART_BYTES, Follow
from smoe.cluster.frames import Frame
from smoe.errors import EngineStateError
from smoe.models.kv_cache import RowCache
from smoe.policy.draft_predictions import DraftPredictions, Expected, TokenStep
from smoe.policy.prediction import Listener

_log = logging.getLogger(__name__)


class Following:
    """Follows the coordinator's text for a draft model on another machine. To the engine it is the same as a draft
    model's thread on the coordinator (`Ahead`)."""

    def __init__(
        self, wanted: Mapping[str, Any], experts: Mapping[int, int], named: Mapping[int, int], capacity: int
    ) -> None:
        """`wanted`: the settings with which the draft model opens its copy. `experts`: the number of each layer's
        experts; `named`: how many of them it predicts; `capacity`: the maximum number of positions of its text."""
        self.wanted = wanted
        self._experts, self._named, self._capacity = experts, named, capacity
        self._lock = threading.Lock()
        self._draft_predictions = DraftPredictions()
        self._cache: RowCache | None = None
        """The KV cache of the text that the draft model follows."""
        self._text = secrets.randbits(62)  # excludes messages about an earlier coordinator's texts
        self._sent = 0
        """The number of positions whose keys and values have been sent."""
        self._sent_step: TokenStep | None = None
        """The last token and position sent to the draft model."""
        self._is_followed = False
        self._ring: Callable[[], object] = lambda: None
        self.steps = 0
        """The number of tokens sent."""
        self.layers = 0
        """The number of layers for which a prediction arrived in time."""
        self.nbytes = 0
        """The bytes of keys and values sent."""

    def ring_by(self, ring: Callable[[], object]) -> None:
        """Call `ring` whenever there is a next message. It makes the thread of the connections request the message."""
        self._ring = ring

    # -- for the model's thread ---------------------------------------------------------------------------------------

    def send_to(self, listener: Listener) -> None:
        """Pass all predictions to `listener` as soon as they arrive, on the thread of the connections."""
        self._draft_predictions.send_to(listener)

    def begin(self, token: int, cache: RowCache) -> None:
        """Let the draft model follow the token that the model decodes now; the earlier tokens are in the model's
        cache."""
        with self._lock:
            if cache is not self._cache:
                self._cache = cache
                self._begin_text()
            self._sent = min(self._sent, cache.length)
            if cache.length >= self._capacity:
                self._draft_predictions.pause()
            else:
                self._draft_predictions.ask(TokenStep(token, cache.length, self._text))
        self._ring()

    def pause(self, cache: RowCache | None = None) -> None:
        """Stop predictions, because the model computes a prompt (after the tokens in `cache`) or decodes a batch."""
        with self._lock:
            self._draft_predictions.pause()
            if cache is not None and cache is self._cache:
                self._sent = min(self._sent, cache.length)
        self._ring()

    def predicted(self) -> tuple[list[Expected], list[Expected]]:
        """Return two lists of predictions received so far: for the token that the model decodes now, and for the next
        token."""
        with self._lock:
            return self._draft_predictions.predicted()

    def close(self) -> None:
        """Stop following the text. Repeated calls have no effect."""
        with self._lock:
            self._draft_predictions.send_to(None)
            self._draft_predictions.pause()
            self._cache = None

    # -- for the link's thread ----------------------------------------------------------------------------------------

    def reset(self, is_followed: bool) -> None:
        """Start again with a draft model that has just connected, or record that the draft model is gone."""
        with self._lock:
            self._is_followed = is_followed
            self._draft_predictions.forget()
            self._begin_text()
            self._draft_predictions.rename_text(self._text)

    def next_message(self, may_send_keys: bool) -> list[Any] | None:
        """Return the next message for the draft model; None if there is none. Missing keys and values come before the
        token, if `may_send_keys`."""
        with self._lock:
            asked, cache, text, begin = self._draft_predictions.asked, self._cache, self._text, self._sent
            if not self._is_followed:
                return None
            if asked is None or cache is None:
                was_following, self._sent_step = self._sent_step is not None, None
                return draft_frames.pause(text) if was_following else None
            if begin >= asked.position:
                if self._sent_step == asked:
                    return None
                self._sent_step, self.steps = asked, self.steps + 1
                return draft_frames.follow(Follow(text, asked.position, asked.token))
            if not may_send_keys:
                return None
            end = min(asked.position, begin + max(1, PART_BYTES // max(1, cache.position_bytes)))
            self._sent = end  # set before copying: after a rewind meanwhile they are sent again
        try:
            rows = cache.taken_out(begin, end)
        except EngineStateError as error:
            _log.debug("the draft model can no longer follow this text: %s", error)  # its cache was invalidated
            self.pause()
            return None
        self.nbytes += rows.numel()
        numbers: Any = rows.numpy()
        return draft_frames.keys(text, begin, end, memoryview(numbers))

    def receive(self, frame: Frame) -> None:
        """Store the predictions in an EXPECTED message. Predictions for another text are dropped. Raises `FrameError`
        for an invalid message."""
        found = draft_frames.parse_expected(frame, self._experts, self._named)
        with self._lock:
            if frame.request != self._text:
                return
            for each in found:
                step = TokenStep(each.token, each.position, self._text)
                if not self._draft_predictions.wants(step):
                    continue
                if step not in self._draft_predictions:
                    self._draft_predictions.begin(step)
                self.layers += self._draft_predictions.add(step, Expected(each.layer, each.experts))

    # -- with the lock ------------------------------------------------------------------------------------------------

    def _begin_text(self) -> None:
        self._text, self._sent, self._sent_step = self._text + 1, 0, None
