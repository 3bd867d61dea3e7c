"""Checks of every request before the API processes it.

    Host is ours -> Origin is allowed -> key is right -> body within bounds, in time -> the API

A web page in a user's browser can send requests to this machine. The check of `Host` refuses other names that resolve
to this machine (DNS rebinding); the check of `Origin` refuses other pages.

All request bodies in memory together have a limit, each from its first byte until its prompt is rendered:

    Guard:    admit -> add, add, add ...   (429 where there is no room, before or during the transfer)
    Serving:                          parse, render -> release

Only received bytes count: a client that announces a large body and sends nothing takes no room from others.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from smoe.server.api_errors import ApiError, busy
from smoe.server.events import Json
from smoe.server.settings import ServerConfig, is_loopback

_log = logging.getLogger(__name__)
_MOST_WARNINGS = 20
_LONGEST_ORIGIN = 200
_IN_SCOPE = "smoe.body"
PROBES = frozenset({"/health", "/healthz", "/ready"})
"""The paths of health checks. They need neither a key nor a `Host` header, which simple probes do not send."""

Counted = Callable[[str, int], None]
"""A function that is called with the path and the status of every response when the response has ended."""


class SentResponse:
    """The HTTP status of one response and whether it has ended, read from its ASGI messages."""

    def __init__(self) -> None:
        self.status = 0
        """The HTTP status; 0 before the response begins. For a stream that ended with an error, the error's status."""
        self.is_whole = False
        """Whether the response has ended."""

    def note(self, message: Message) -> None:
        """Process the response's next message."""
        self.status = message.get("status", self.status)
        if message["type"] == "http.response.body":
            self.is_whole = not message.get("more_body", False)


class BodyBudget:
    """Limits the memory for all request bodies of one server. Only the event loop's thread may call it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def admit(self, nbytes: int) -> BodyBytes:
        """Return an account for a body of `nbytes` bytes (0: unknown length). Raises an `ApiError` of status 429 if
        there is no room for it."""
        self._check(nbytes)
        return BodyBytes(self)

    def take(self, nbytes: int) -> None:
        """Count `nbytes` more bytes of request bodies in memory. Raises an `ApiError` of status 429 if the sum exceeds
        the limit."""
        self._check(nbytes)
        self.held_bytes += nbytes

    def _check(self, nbytes: int) -> None:
        if self.held_bytes + nbytes > self._most_bytes:
            raise busy(
                f"other requests' bodies fill the {self._most_bytes} bytes reserved for bodies; try again later, or "
                "start the server by smoe serve --max-bodies with a larger size"
            )


class BodyBytes:
    """The account of one request's body: how many of its bytes count towards the limit of all bodies."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._nbytes = budget, 0

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more received bytes. Raises an `ApiError` of status 429 if they exceed the limit."""
        self._budget.take(nbytes)
        self._nbytes += nbytes

    def release(self) -> None:
        """Stop counting the bytes of this body, because it is no longer in memory. Repeated calls have no effect."""
        self._budget.held_bytes -= self._nbytes
        self._nbytes = 0

    def put_into(self, scope: Scope) -> None:
        """Attach this account to the request's scope, so that `release_body` can end it before the response ends."""
        scope[_IN_SCOPE] = self


def release_body(scope: Scope) -> None:
    """End the account of a request's body, which has been read and is no longer in memory."""
    held = scope.get(_IN_SCOPE)
    if isinstance(held, BodyBytes):
        held.release()


class Guard:
    """ASGI middleware that checks every request."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        open_paths: frozenset[str],
        counted: Counted,
        warn: Callable[[str], None] = _log.warning,
        bodies: BodyBudget | None = None,
    ) -> None:
        """`open_paths`: paths that need no key. `warn` prints for the user who started the server. `bodies`: the
        account of the memory for request bodies (None: the limit in `config`)."""
        self._app, self._config, self._open, self._counted, self._warn = app, config, open_paths, counted, warn
        self._refused: set[str] = set()
        """The origins for which a warning has been printed."""
        self._bodies = bodies or BodyBudget(config.most_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here speaks over web sockets
            await send({"type": "websocket.close", "code": 1008})
            return
        scope = {**scope, "path": _meant(scope["path"])}
        path, response = scope["path"], SentResponse()

        async def counting(message: Message) -> None:
            response.note(message)
            if response.is_whole:
                self._counted(path, response.status)
            await send(message)

        try:
            await self._checked(scope, receive, counting)
        finally:
            if response.status and not response.is_whole:
                self._counted(path, response.status)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], Headers(scope=scope)
        try:
            self._check_host(path, headers)
            self._check_origin(headers)
            self._check_key(path, headers)
            _check_path(path)
            held = self._admit(headers)
        except ApiError as problem:
            await _refuse(problem, path, has_body=_has_body(headers))(scope, receive, send)
            return
        held.put_into(scope)
        try:
            await self._answer(held, scope, receive, send)
        finally:
            held.release()

    async def _answer(self, held: BodyBytes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            whole = await self._with_body(held, receive)
        except ApiError as problem:
            await _refuse(problem, scope["path"], has_body=True)(scope, receive, send)
            return
        await self._app(scope, whole, send)

    def _check_host(self, path: str, headers: Headers) -> None:
        if path in PROBES or not self._config.is_local:
            return
        host = _name_of(headers.get("host", ""))
        if host and is_loopback(host):
            return
        given = f"the request names the host {host[:100]!r}" if host else "the request has no Host header"
        message = f"{given}; this server accepts names of this machine only: send 'Host: localhost'"
        raise ApiError(403, message, type="permission_error", code="unknown_host")

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or "*" in self._config.allow_origin or origin in self._config.allow_origin:
            return
        if _place_of(origin) != headers.get("host", ""):
            message = (
                f"web pages of {origin[:100]!r} are not allowed to use this server; start the server by smoe serve "
                "--allow-origin with that origin"
            )
            self._warn_of(origin)
            raise ApiError(403, message, type="permission_error", code="unknown_origin")

    def _warn_of(self, origin: str) -> None:
        """Warn once for each refused origin, because the browser does not show the user a reason."""
        if len(origin) > _LONGEST_ORIGIN or origin in self._refused or len(self._refused) >= _MOST_WARNINGS:
            return
        self._refused.add(origin)
        shown = origin if origin.isprintable() else repr(origin)
        if "://" in origin:
            self._warn(f"a web page of {shown} was refused; to allow it, give `allow_origin={shown}`")
        else:
            self._warn(f"a web page without an origin ({shown}) was refused; only `allow_origin` * allows it")

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._config.api_key
        if key is None or path in self._open:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")  # Anthropic's clients
        if not hmac.compare_digest(given.strip().encode("utf8", "replace"), key.encode()):
            message = "the API key is missing or wrong; send 'Authorization: Bearer KEY' with the key of this server"
            raise ApiError(401, message, code="invalid_api_key")

    def _admit(self, headers: Headers) -> BodyBytes:
        length = headers.get("content-length", "0")
        nbytes = int(length[:20]) if length.isascii() and length.isdigit() else 0
        if nbytes > self._config.max_body_bytes:
            raise self._too_large()
        return self._bodies.admit(nbytes)

    async def _with_body(self, held: BodyBytes, receive: Receive) -> Receive:
        """Receive the whole body within the limits, and return a `receive` that replays it from memory."""
        seconds = self._config.body_seconds
        try:
            first = await asyncio.wait_for(self._body(held, receive), seconds)
        except asyncio.TimeoutError:
            message = (
                f"the request's body was not received within {seconds:g} seconds; send it faster, or start the server "
                "by smoe serve --body-timeout with a longer time"
            )
            raise ApiError(408, message, code="request_timeout") from None
        pending = [first]

        async def replayed() -> Message:
            return pending.pop() if pending else await receive()

        return replayed

    async def _body(self, held: BodyBytes, receive: Receive) -> Message:
        body = bytearray()  # no list of parts: they may be of one byte each
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            part = message.get("body", b"")
            if len(body) + len(part) > self._config.max_body_bytes:
                raise self._too_large()
            held.add(len(part))
            body += part
            if not message.get("more_body", False):
                return {"type": "http.request", "body": bytes(body), "more_body": False}

    def _too_large(self) -> ApiError:
        message = (
            f"the request's body is larger than {self._config.max_body_bytes} bytes, the largest size allowed; send "
            "less, or start the server by smoe serve --max-body with a larger size"
        )
        return ApiError(413, message, code="request_too_large")


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _refuse(problem: ApiError, path: str, has_body: bool) -> Json:
    """Return an error response that is sent without waiting for the rest of the request's body. If there is a body, the
    connection ends after the response."""
    return Json(problem.body_at(path), problem.status, problem.headers | ({"Connection": "close"} if has_body else {}))


def _place_of(origin: str) -> str | None:
    """Return the host and port of a web page's origin; None if the origin is invalid."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


_API = ("chat", "completions", "embeddings", "messages", "models", "responses")
"""The path components that follow /v1 in paths of the API."""
_SLASHES = re.compile(r"/{2,}")


def _meant(path: str) -> str:
    """Return the path that a client probably means. Some clients' base URLs end with one slash too many, or lack
    /v1."""
    path = _SLASHES.sub("/", path)
    return f"/v1{path}" if path.split("/")[1:2] and path.split("/")[1] in _API else path


def _check_path(path: str) -> None:
    """Raise an `ApiError` for unprintable characters: route patterns would ignore a line feed at the end of a path."""
    if not path.isprintable():
        raise ApiError(404, f"there is no {path[:100]!r} here; its path contains characters that are not allowed")


def _name_of(host: str) -> str:
    """Return the host name of a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
