"""HTTP responses: streams of server-sent events, and JSON bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from smoe.server.texts import Texts

_T = TypeVar("_T")
PATIENCE_SECONDS = 15.0
"""After this many seconds without an event, a stream sends a comment, so that proxies and clients do not close it."""
STILL_HERE = b": still here\n\n"
_LINE_ENDS = "\x85\u2028\u2029"
"""Line separators that JSON does not escape."""
CLIENT_GONE = 499
"""The status in the log and the metrics of a request whose client disconnected before the response."""
DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Return a value as JSON. Lone surrogates, which the description of a tool may contain, become question marks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf8", "replace")


def event(value: Any, name: str | None = None) -> bytes:
    """Return the bytes of one server-sent event. The data contains no line separators: those that JSON leaves unescaped
    are escaped here, because some clients, such as httpx, split lines at them, as Python does."""
    data = to_json(value)
    for character in _LINE_ENDS:
        data = data.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    data = b"data: " + data + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


class Json(Response):
    """A response with a JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class ClientGoneError(Exception):
    """Raised if the client has disconnected."""


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Return the result of `work`. If the client disconnects first, cancel it and raise `ClientGoneError`."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await _cancelled(working, leaving)


class EventStream(Response):
    """A response that streams events. When the client disconnects, unfinished texts are cancelled.

    After an error its ASGI messages have the error's status, for `SentResponse`; the client has received 200.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], texts: Texts, media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._texts = events, texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._texts.cancel()
            await _cancelled(writing, leaving)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send(self._body(data, more_body=True))
        await send(self._body(b"", more_body=False))

    def _body(self, data: bytes, more_body: bool) -> Message:
        status = self._texts.error_status or self.status_code
        return {"type": "http.response.body", "body": data, "more_body": more_body, "status": status}


async def _left(receive: Receive) -> None:
    """Return when the client has disconnected."""
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
