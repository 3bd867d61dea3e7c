"""How many bytes of bodies the server holds in all, from their first byte until their prompts are rendered.

    Guard:    admit -> add, add, add ...   (429 where there is no room, before or while a body comes)
    Serving:                          parse, render -> release

Only bytes that have come count: a client that announces a large body and sends nothing takes no room from others.
"""

from __future__ import annotations

from starlette.types import Scope

from smoe.server.problem import busy

_IN_SCOPE = "smoe.body"


class BodyBudget:
    """The memory for bodies of one server; belongs to its event loop's thread."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def admit(self, nbytes: int) -> BodyBytes:
        """Room for a body of this length, as far as the client gives one (0: it does not). Raises an `ApiError` of
        status 429 where there is none."""
        self._check(nbytes)
        return BodyBytes(self)

    def take(self, nbytes: int) -> None:
        """Hold so many bytes more. Raises an `ApiError` of status 429 where there is no room for them."""
        self._check(nbytes)
        self.held_bytes += nbytes

    def _check(self, nbytes: int) -> None:
        if self.held_bytes + nbytes > self._most_bytes:
            raise busy("the requests being read fill the memory reserved for them; try again later")


class BodyBytes:
    """What one request's body takes of a budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._nbytes = budget, 0

    def add(self, nbytes: int) -> None:
        """So many bytes have come. Raises an `ApiError` of status 429 where there is no room for them."""
        self._budget.take(nbytes)
        self._nbytes += nbytes

    def release(self) -> None:
        """The body is no longer in memory. May be called again."""
        self._budget.held_bytes -= self._nbytes
        self._nbytes = 0

    def put_into(self, scope: Scope) -> None:
        """Let whatever answers the request release them earlier than its answer ends."""
        scope[_IN_SCOPE] = self


def release_body(scope: Scope) -> None:
    """A request's body has been read and is no longer in memory."""
    held = scope.get(_IN_SCOPE)
    if isinstance(held, BodyBytes):
        held.release()
