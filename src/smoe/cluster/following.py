"""The coordinator's text, followed by a draft model on another machine: what to send next, and its predictions.

    model's thread    begin: a token at its place   pause: a prompt, a batch          said: predictions so far
    link's thread     next_message: keys and values that it lacks, in parts, then the token     hear: experts named

The newest token alone is sent: what has not gone when the model is further on is of no use. Keys and values go once,
and again from where the text was taken back to. Predictions decide only what is loaded early.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from smoe.cluster import shadow_frames
from smoe.cluster.frames import Frame
from smoe.cluster.shadow_frames import PART_BYTES, Follow
from smoe.errors import EngineStateError
from smoe.models.kv_cache import RowCache
from smoe.policy.draft_predictions import DraftPredictions, Expected, TokenStep
from smoe.policy.prediction import Listener

_log = logging.getLogger(__name__)


class Following:
    """Replaces a draft model's thread on the coordinator (`Ahead`)."""

    def __init__(
        self, wanted: Mapping[str, Any], experts: Mapping[int, int], named: Mapping[int, int], capacity: int
    ) -> None:
        """`wanted`: the settings that a shadow is to open its copy with. Layers have so many `experts`, of which a
        shadow names so many; it has room for `capacity` positions."""
        self.wanted = wanted
        self._experts, self._named, self._capacity = experts, named, capacity
        self._lock = threading.Lock()
        self._draft_predictions = DraftPredictions()
        self._cache: RowCache | None = None
        """Whose text it is."""
        self._text = secrets.randbits(62)  # what a shadow still says of an earlier main's is none of ours
        self._sent = 0
        """Positions whose keys and values have been sent."""
        self._sent_step: TokenStep | None = None
        """The step that was last sent to the draft model."""
        self._is_followed = False
        self.ring: Callable[[], object] = lambda: None
        """Has the link's thread ask for the next message."""
        self.steps = 0
        """Tokens that were sent,"""
        self.layers = 0
        """layers with a prediction that came in time,"""
        self.nbytes = 0
        """and keys and values sent."""

    # -- for the model's thread ---------------------------------------------------------------------------------------

    def tell(self, listener: Listener) -> None:
        """It hears everything at once, on the link's thread."""
        self._draft_predictions.listener = listener

    def begin(self, token: int, cache: RowCache) -> None:
        """The model decodes this token behind what is in its cache."""
        with self._lock:
            if cache is not self._cache:
                self._cache = cache
                self._begin_text()
            self._sent = min(self._sent, cache.length)
            if cache.length >= self._capacity:
                self._draft_predictions.pause()
            else:
                self._draft_predictions.ask(TokenStep(token, cache.length, self._text))
        self.ring()

    def pause(self, cache: RowCache | None = None) -> None:
        """The model does something that no shadow follows: a prompt, behind what is in this cache, or a batch."""
        with self._lock:
            self._draft_predictions.pause()
            if cache is not None and cache is self._cache:
                self._sent = min(self._sent, cache.length)
        self.ring()

    def said(self) -> tuple[list[Expected], list[Expected]]:
        """(predictions for the token that the model decodes, so far; for the one after it)."""
        with self._lock:
            return self._draft_predictions.said()

    def close(self) -> None:
        """Follow no text any more. Idempotent."""
        with self._lock:
            self._draft_predictions.listener = None
            self._draft_predictions.pause()
            self._cache = None

    # -- for the link's thread ----------------------------------------------------------------------------------------

    def reset(self, is_followed: bool) -> None:
        """A shadow has come, which knows nothing; or it has gone."""
        with self._lock:
            self._is_followed = is_followed
            self._draft_predictions.forget()
            self._begin_text()
            if self._draft_predictions.asked is not None:
                self._draft_predictions.asked = self._draft_predictions.asked._replace(text=self._text)

    def next_message(self, may_send_keys: bool) -> list[Any] | None:
        """What the shadow is to be sent now; None: nothing. Where it `may_send_keys` these come first."""
        with self._lock:
            asked, cache, text, begin = self._draft_predictions.asked, self._cache, self._text, self._sent
            if not self._is_followed:
                return None
            if asked is None or cache is None:
                was_following, self._sent_step = self._sent_step is not None, None
                return shadow_frames.pause(text) if was_following else None
            if begin >= asked.position:
                if self._sent_step == asked:
                    return None
                self._sent_step, self.steps = asked, self.steps + 1
                return shadow_frames.follow(Follow(text, asked.position, asked.token))
            if not may_send_keys:
                return None
            end = min(asked.position, begin + max(1, PART_BYTES // max(1, cache.position_bytes)))
            self._sent = end  # before they are copied: where the text is taken back meanwhile, they are sent again
        try:
            rows = cache.taken_out(begin, end)
        except EngineStateError as error:
            _log.debug("the draft model can no longer follow this text: %s", error)  # its cache has been given up
            self.pause()
            return None
        self.nbytes += rows.numel()
        numbers: Any = rows.numpy()
        return shadow_frames.keys(text, begin, end, memoryview(numbers))

    def hear(self, frame: Frame) -> None:
        """Take a draft model's prediction; one for another text is dropped. Raises `FrameError`."""
        found = shadow_frames.parse_expected(frame, self._experts, self._named)
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
