"""The process of a draft model on another machine: follows the coordinator's text, and sends the experts its routers
choose.

    connected --DRAFT--> WELCOME: open this --files are opened, on a thread--> DRAFT --> WELCOME: follows
                          WELCOME: not needed, or not now; DRAFT is repeated
                          REFUSED: ends with the reason

The copy of the model stays open when the coordinator ends, because the next coordinator mostly needs the same copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import zmq

from smoe import __version__
from smoe.cluster import draft_frames, frames
from smoe.cluster.dial import refusal
from smoe.cluster.draft_frames import ExpectedExperts
from smoe.cluster.frames import Frame, FrameKind
from smoe.cluster.stored_identity import Worker
from smoe.cluster.talking import Talking
from smoe.errors import SmoeError
from smoe.policy.draft_predictions import Expected, TokenStep

_RETRY_SECONDS = 10.0
"""Seconds after a failed attempt to open the model's files until the next attempt, if the coordinator still requests
them."""
_log = logging.getLogger(__name__)


class Along(Protocol):
    """A draft model: a copy of the model in fewer bits that decodes the coordinator's text at the same time. Only the
    thread that receives messages may call it."""

    @property
    def capacity(self) -> int:
        """The maximum number of positions of a text."""

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values of one position in all layers."""

    @property
    def nbytes(self) -> int:
        """The bytes of memory that this copy of the model takes."""

    def learn(self, text: int, begin: int, end: int, rows: Any) -> None:
        """Store the keys and values of positions `begin` to `end` of a text, given as bytes.

        Raises `ValueError` if earlier positions are missing.
        """

    def begin(self, text: int, position: int, token: int) -> None:
        """Decode the token that the coordinator decodes. Raises `ValueError` if this copy lacks the keys and values of
        an earlier position."""

    def pause(self) -> None:
        """Stop decoding: the coordinator's next passes cannot be followed."""

    def close(self) -> None:
        """Release this copy of the model. Repeated calls have no effect."""


class Files(Protocol):
    """The files of a model on this machine, from which draft models are opened."""

    weights: str
    """The checksum of the files."""

    def open(self, wanted: Mapping[str, Any], on_prediction: Callable[[TokenStep, Expected], None]) -> Along:
        """Return a copy of the model with the coordinator's settings. Raises `SmoeError`."""


class DraftProcess(Talking):
    """The thread of a draft model's connection to the coordinator."""

    def __init__(self, me: Worker, files: Files, on_change: Callable[[str], None] = lambda _: None) -> None:
        """`on_change` is called with a message for the user when the draft model follows a coordinator, opens files,
        fails to open files, or loses the coordinator."""
        super().__init__(me, on_change)
        self._files = files
        self._opened: tuple[Mapping[str, Any], Along] | None = None
        self._opening: threading.Thread | None = None
        self._cannot: tuple[Mapping[str, Any], str, float] | None = None
        """The settings that could not be opened, the reason, and the time of the attempt."""
        self._text = -1
        """The number of the followed text."""
        self._unsent: list[ExpectedExperts] = []
        self._lock = threading.Lock()
        self._waits_for = ""

    @property
    def _part_bytes(self) -> int:
        return draft_frames.MOST_BYTES

    def _greeting(self) -> list[Any]:
        message = {
            "smoe": __version__,
            "name": self._me.name,
            "code": self._me.code,
            "weights": self._files.weights,
            "opened": None if self._opened is None else self._opened[0],
            "memory_bytes": 0 if self._opened is None else self._opened[1].nbytes,
            "cannot": None if self._cannot is None else self._cannot[1],
        }
        return frames.talk(FrameKind.DRAFT, message)

    def _over(self) -> None:
        opening = self._opening
        if opening is not None:
            opening.join()
        if self._opened is not None:
            self._opened[1].close()

    def _lost(self) -> None:
        if self._opened is not None:
            self._opened[1].pause()

    def _answer(self, dealer: zmq.Socket[bytes], frame: Frame) -> None:
        if frame.kind is FrameKind.WELCOME:
            self._welcomed(frames.fields_of(frame))
        elif frame.kind is FrameKind.REFUSED:
            raise refusal(self._me, frame)
        elif frame.kind is FrameKind.LEAVE:
            self._received_at = 0.0
        elif self._is_in and self._opened is not None and frame.kind in (FrameKind.KEYS, FrameKind.FOLLOW):
            try:
                self._read(dealer, frame, self._opened[1])
            except ValueError as error:  # the text's beginning is missing: the coordinator starts again
                _log.warning("the draft model cannot continue this text: %s", error)
                self._is_in, self._sent_at = False, 0.0

    def _read(self, dealer: zmq.Socket[bytes], frame: Frame, along: Along) -> None:
        if frame.kind is FrameKind.KEYS:
            keys = draft_frames.parse_keys(frame, along.position_bytes, along.capacity)
            along.learn(*keys)
            self._send(dealer, draft_frames.taken(keys.text))
            return
        step = draft_frames.parse_follow(frame)
        if step is None:
            along.pause()
            return
        self._text = step.text
        along.begin(*step)

    def _welcomed(self, message: dict[str, Any]) -> None:
        wanted = message.get("wanted")
        if not isinstance(wanted, dict):
            self._is_in = False
            self._wait_for(f"waits: {message.get('why', 'the coordinator does not use it')}"[:500])
        elif self._opened is not None and self._opened[0] == wanted:
            if not self._is_in:
                self._is_in = True
                self._wait_for("")
                self._on_change("follows the coordinator")
        elif self._opening is None and self._may_open(wanted):
            self._is_in = False
            self._opening = threading.Thread(target=self._open, args=(wanted,), name="smoe-opening", daemon=True)
            self._opening.start()

    def _wait_for(self, words: str) -> None:
        """Report the reason `words` for which the draft model waits, unless it was the last reason reported."""
        if words and words != self._waits_for:
            self._on_change(words)
        self._waits_for = words

    def _may_open(self, wanted: Mapping[str, Any]) -> bool:
        cannot = self._cannot
        return cannot is None or cannot[0] != wanted or time.monotonic() - cannot[2] > _RETRY_SECONDS

    # -- other threads ------------------------------------------------------------------------------------------------

    def _open(self, wanted: Mapping[str, Any]) -> None:
        """Open the copy of the model that the coordinator requests with the settings `wanted`, and close the present
        copy."""
        before, self._opened = self._opened, None
        try:
            if before is not None:
                before[1].close()
            self._on_change(f"loads a copy in {str(wanted.get('draft_precision'))[:20]}")
            self._opened, self._cannot = (wanted, self._files.open(wanted, self._hear_draft)), None
        except (SmoeError, OSError, MemoryError) as error:
            self._cannot = (wanted, str(error), time.monotonic())
            self._on_change(f"cannot load what the coordinator requests: {error}")
        except Exception as error:  # the coordinator gets the reason, and may send other settings
            _log.exception("the draft model could not be loaded")
            self._cannot = (wanted, f"{type(error).__name__}: {error}", time.monotonic())
        finally:
            self._sent_at = 0.0  # greet the coordinator at once
            self._opening = None
            self._queue.put([])

    def _hear_draft(self, step: TokenStep, expected: Expected) -> None:
        """Queue a prediction for the coordinator. The draft model's thread calls this; predictions that are ready
        together are sent together."""
        with self._lock:
            self._unsent.append(ExpectedExperts(step.position, step.token, expected.layer, expected.experts))
            is_first = len(self._unsent) == 1
        if is_first:
            self._queue.put([])

    def _turn(self, dealer: zmq.Socket[bytes]) -> None:
        super()._turn(dealer)
        with self._lock:
            message, self._unsent = self._unsent, []
        for begin in range(0, len(message), draft_frames.MOST_PREDICTIONS):
            if self._is_in:
                part = message[begin : begin + draft_frames.MOST_PREDICTIONS]
                self._send(dealer, draft_frames.expected(self._text, part))
