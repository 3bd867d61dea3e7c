"""Logs one line for every finished request (shown with `-v`).

    POST /v1/chat/completions 200 6.51s prompt=34 reused=12 new=200 first=0.12s rate=31.2/s ended=length
    GET /v1/models 200 0.00s

A stream that an error ends has the error's status, although 200 was sent at its beginning.

`first`: the time from the request to the first token. `rate`: tokens a second after the first, of all texts together.
`ended`: length, stop, failed, cut_off (by the server's shutdown), client_gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smoe.generation.request import EndReason
from smoe.server.events import CLIENT_GONE
from smoe.server.guard import SentResponse
from smoe.server.texts import Texts

_log = logging.getLogger(__name__)
_LONGEST_PATH = 200
_ENDED = {
    EndReason.LENGTH: "length",
    EndReason.END: "stop",
    EndReason.STOP: "stop",
    EndReason.FAILED: "failed",
    EndReason.CANCELLED: "cut_off",
}
_asked: ContextVar[list[Texts] | None] = ContextVar("asked", default=None)
"""The texts of the current request; None if requests are not logged."""


def note_asked(texts: Texts) -> None:
    """Record that these texts belong to the current request. Its log line will have their token counts."""
    asked = _asked.get()
    if asked is not None:
        asked.append(texts)


class RequestLines:
    """ASGI middleware that logs every request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began, response = time.perf_counter(), SentResponse()
        asked: list[Texts] = []
        _asked.set(asked)

        async def seen(message: Message) -> None:
            response.note(message)
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            seconds = time.perf_counter() - began
            words = [scope["method"], _shown(scope["path"]), str(response.status), f"{seconds:.2f}s"]
            if asked:
                words += _of_texts(asked, response.is_whole and response.status != CLIENT_GONE)
            _log.info("%s", " ".join(words))


def _of_texts(asked: Sequence[Texts], is_whole: bool) -> list[str]:
    requests = [request for texts in asked for request in texts.requests]
    prompts = {id(request.ids): request for request in reversed(requests)}.values()
    begun = [request for request in requests if request.new_ids]
    new = sum(len(request.new_ids) for request in begun)
    words = [
        f"prompt={sum(len(request.ids) for request in prompts)}",
        f"reused={sum(request.reused_tokens for request in prompts)}",
        f"new={new}",
    ]
    if begun:
        first = min(request.first for request in begun)
        words.append(f"first={first - min(request.asked for request in begun):.2f}s")
        seconds = max(request.ended for request in begun) - first
        if new > len(begun) and seconds > 0:
            words.append(f"rate={(new - len(begun)) / seconds:.1f}/s")
    reasons = (
        {_ENDED[reason]: None for texts in asked for reason in texts.reasons} if is_whole else {"client_gone": None}
    )
    return [*words, f"ended={','.join(reasons) or 'cut_off'}"]


def _shown(path: str) -> str:
    """Return a client's path as a short text for the log; a path with spaces or unprintable characters becomes a
    literal."""
    short = path[:_LONGEST_PATH]
    return short if short.isprintable() and " " not in short else repr(short)
