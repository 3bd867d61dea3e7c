"""The limit for all request bodies in memory together, each from its first byte until its prompt is rendered.

    Guard:    admit -> add, add, add ...   (429 where there is no room, before or during the transfer)
    Serving:                          parse, render -> release

Only received bytes count: a client that announces a large body and sends nothing takes no room from others.
"""

from __future__ import annotations

from starlette.types import Scope

from smoe.server.problem import busy

_IN_SCOPE = "smoe.body"


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
            raise busy("the requests being read fill the memory reserved for them; try again later")


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
