"""The coordinator's end of a draft model's connection; one draft model at a time is active and follows the text.

    draft model    DRAFT (its identity and state) -->                        opens its files ... DRAFT -->
    coordinator                                   <-- WELCOME (what to open)                 <-- WELCOME: it is in
    coordinator    KEYS, FOLLOW -->   EXPECTED <--   both BEAT; when silent, gone or invalid: goes on without it

A greeting contains the draft model's whole state, so either machine may be started first, or restarted. Only the link's
thread may use this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from smoe import __version__
from smoe.cluster import frames
from smoe.cluster.admission import Admission
from smoe.cluster.following import Following
from smoe.cluster.frames import Frame, FrameKind

BEAT_SECONDS = 0.5
SILENCE_SECONDS, PATIENCE_SECONDS = 1.0, 10.0
"""Seconds without a message after which the coordinator goes on without the draft model, which sends one every 0.1 s;
and the same while it opens its files, which may keep it busy."""
_WINDOW = 2
"""The maximum number of messages with keys and values in flight: requests for experts wait behind at most these."""
_log = logging.getLogger(__name__)

Send = Callable[[bytes, list[Any]], bool]


class Seat:
    """The coordinator's connection to its draft model: the draft model's state, and the messages to it."""

    def __init__(self, following: Following | None, asked: Mapping[str, Any], admission: Admission) -> None:
        """`following`: the text that the draft model follows; None if this coordinator uses no draft model. `asked`:
        the fields of a draft model's greeting that must have these values."""
        self.following = following
        self._asked, self._admission = asked, admission
        self.name = ""
        """The name of the draft model that was connected last; empty if none has connected."""
        self.state = "out"
        self.why = ""
        """The reason why the draft model is not used, or has opened no files."""
        self._on_change: Callable[[], object] = lambda: None
        self._key = ""
        self._route = b""
        self._fields: dict[str, Any] = {}
        self._received_at = self._beaten = 0.0
        self._is_open = False
        """Whether the draft model has opened the copy that this coordinator requests."""
        self._under_way = 0
        """The number of messages with keys and values that the draft model has not confirmed yet."""

    def begin(self, ring: Callable[[], object], on_change: Callable[[], object]) -> None:
        """Accept connections of draft models. `ring` makes the link's thread call `turn` soon, and any thread may call
        `ring`. `on_change` is called when the state of the draft model changes."""
        self._on_change = on_change
        if self.following is not None:
            self.following.ring_by(ring)

    @property
    def is_in(self) -> bool:
        """Whether a draft model is connected, has opened its files, and follows the text."""
        return self.state == "ready"

    @property
    def may_come(self) -> bool:
        """Whether a draft model is needed and missing, and no known reason prevents one from connecting."""
        return self.following is not None and not self.is_in and not self.why

    def is_of(self, route: bytes, kind: FrameKind) -> bool:
        """Return whether a message comes from a draft model. `route`: the sender's ZeroMQ routing id."""
        return kind is FrameKind.DRAFT or self.has(route)

    def has(self, route: bytes) -> bool:
        """Return whether this ZeroMQ routing id belongs to the connected draft model."""
        return route == self._route and self.state != "out"

    def receive(self, route: bytes, key: str, frame: Frame, now: float, send: Send) -> None:
        """Process a message from a draft model. Raises `FrameError` for an invalid message."""
        if frame.kind is FrameKind.DRAFT:
            self._greeted(route, key, frames.fields_of(frame), now, send)
        elif key == self._key:
            self._received_at = now
            if frame.kind is FrameKind.LEAVE:
                self.leave("left")
            elif frame.kind is FrameKind.TAKEN:
                self._under_way = max(0, self._under_way - 1)
            elif frame.kind is FrameKind.EXPECTED and self.following is not None and self.is_in:
                self.following.receive(frame)

    def turn(self, now: float, send: Send) -> None:
        """Send the draft model's pending messages, and disconnect the draft model if it has been silent for too
        long."""
        if self.state == "out":
            return
        most = SILENCE_SECONDS if self.is_in else PATIENCE_SECONDS
        if now - self._received_at > most:
            self.put_out(f"sent nothing for {most:g} s", send)
            return
        if now - self._beaten > BEAT_SECONDS:
            self._beaten = now
            if not send(self._route, frames.alone(FrameKind.BEAT)):
                self.leave("disconnected")
        while self.is_in and self.following is not None:
            parts = self.following.next_message(self._under_way < _WINDOW)
            if parts is None:
                return
            self._under_way += len(parts) > 2  # keys
            if not send(self._route, parts):
                self.leave("disconnected")

    def beat_soon(self) -> None:
        """Make the next `turn` check whether the draft model is still connected, because some machine's connection has
        closed."""
        self._beaten = 0.0

    def put_out(self, why: str, send: Send) -> None:
        """Continue without the draft model, for the reason `why`. The draft model gets a LEAVE message, so that it can
        connect again."""
        if self.state != "out":
            send(self._route, frames.alone(FrameKind.LEAVE))
            self.leave(why)

    def leave(self, why: str) -> None:
        """Record that the draft model has gone, for the reason `why`."""
        self._became("out", why)

    def described(self) -> dict[str, Any] | None:
        """Return the state of the draft model, for users and programs; None if no draft model has connected."""
        if not self.name:
            return None
        following = self.following
        return {
            "name": self.name,
            "state": self.state,
            "why": self.why,
            "precision": None if following is None or not self._is_open else following.wanted["draft_precision"],
            "memory_bytes": _whole(self._fields.get("memory_bytes")),
            "tokens_followed": 0 if following is None else following.steps,
            "layers_named": 0 if following is None else following.layers,
            "bytes_sent": 0 if following is None else following.nbytes,
        }

    def _greeted(self, route: bytes, key: str, fields: dict[str, Any], now: float, send: Send) -> None:
        why = self._refusal(key, fields)
        if why:
            send(route, frames.talk(FrameKind.REFUSED, {"why": why}))
            return
        if self.state != "out" and key != self._key:
            send(
                route,
                frames.talk(
                    FrameKind.WELCOME, {"wanted": None, "why": f"{self.name} is already the coordinator's draft model"}
                ),
            )
            return
        if self.is_in:
            self.leave("reconnected")  # or it has missed a message
        self._admission.note_role(key, is_draft=True)
        self._key, self._route, self._received_at = key, route, now
        self.name, self._fields = self._admission.name_of(key) or "?", fields
        if self.following is None:
            self._became("not used")
            send(
                route,
                frames.talk(
                    FrameKind.WELCOME, {"wanted": None, "why": "this coordinator decodes without a draft model"}
                ),
            )
            return
        self._is_open = is_open = fields.get("opened") == self.following.wanted
        self._under_way = 0
        self._became("ready" if is_open else "opens its files", "" if is_open else _words(fields.get("cannot")))
        send(route, frames.talk(FrameKind.WELCOME, {"wanted": self.following.wanted}))

    def _refusal(self, key: str, fields: dict[str, Any]) -> str:
        for what, mine in {"smoe": __version__, **self._asked}.items():
            if fields.get(what) != mine:
                return f"its {what} is {str(fields.get(what))[:80]!r}, the coordinator has {mine!r}"
        return self._admission.admitted(key, fields)

    def _became(self, state: str, why: str = "") -> None:
        if (state, why) == (self.state, self.why):
            return
        was_in, self.state, self.why = self.is_in, state, why
        _log.info("draft model %s: %s%s", self.name, state, f" ({why})" if why else "")
        if self.following is not None and was_in != self.is_in:
            self.following.reset(self.is_in)
        self._on_change()


def _whole(fields: Any) -> int:
    return fields if type(fields) is int and fields >= 0 else 0


def _words(text: Any) -> str:
    """Return the printable characters of a text that another machine has sent, at most 500; empty for anything but a
    text."""
    return "".join(c for c in text[:500] if c.isprintable()) if isinstance(text, str) else ""
