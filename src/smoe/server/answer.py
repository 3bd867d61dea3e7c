"""Responses to requests for text, as far as all endpoints have them in common: generated texts become one JSON body or
a stream of events."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from smoe.server.api_errors import ApiError, problem_of
from smoe.server.choice import ChoiceText, Delta
from smoe.server.events import DONE, PATIENCE_SECONDS, STILL_HERE, EventStream, Json, event, unless_gone
from smoe.server.serving import Serving
from smoe.server.texts import Texts


@dataclass(frozen=True)
class Form:
    """The values of a request, apart from the prompt, from which its response is made."""

    settings: Mapping[str, str]
    """{name of a library setting that this request sets: its name in the request}, for error messages."""
    is_streamed: bool
    wants_usage: bool
    """Whether a stream ends with the token counts."""
    has_logprobs: bool


class EndpointAnswer(ABC):
    """Makes the response to one request for text. Each endpoint (chat, completions, responses) has a subclass."""

    done = DONE
    """The last event of a stream; empty if streams of this endpoint have none."""
    still_here = STILL_HERE
    """The bytes that a stream sends to stay open while no text is generated; empty: none."""
    media_type = EventStream.media_type
    """The media type of a streamed response."""

    def __init__(self, texts: Texts, choices: Sequence[ChoiceText], fields: Mapping[str, str]) -> None:
        """`fields`: {name of a library setting: its name in the request}, for error messages."""
        self._texts, self._choices, self._fields = texts, list(choices), fields

    async def to(self, request: Request, is_streamed: bool) -> Response:
        """Return the HTTP response: a stream of events, or one JSON body."""
        if is_streamed:
            return EventStream(self.events(), self._texts, self.media_type)
        return Json(await unless_gone(request, self.whole()))

    async def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed. Raises an `ApiError` if a text fails."""
        with self._texts as texts:
            try:
                while not texts.are_over:
                    for item in await texts.next(PATIENCE_SECONDS):
                        self._keep(item.number, self._choices[item.number].take(item.what))
            except Exception as error:
                raise problem_of(error, self._fields) from error
        return self._ended()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream. An error becomes an event, because the status 200 has already been sent."""
        with self._texts as texts:
            try:
                if begun := self._begun():
                    yield begun
                while not texts.are_over:
                    news, chunk = await texts.next(PATIENCE_SECONDS), b""
                    for item in news:
                        chunk += self._added(item.number, self._choices[item.number].take(item.what))
                    if data := chunk or (b"" if news else self.still_here):
                        yield data
                if last := self._last():
                    yield last
            except Exception as error:
                problem = problem_of(error, self._fields)
                texts.fail(problem.status)
                yield self._failed(problem)
            if self.done:
                yield self.done

    def _keep(self, index: int, delta: Delta) -> None:
        """Store `delta`, which has been added to choice `index`, in a response that is not streamed. The choice itself
        is already updated."""

    @abstractmethod
    def _ended(self) -> dict[str, Any]:
        """Return the body of the finished response."""

    def _begun(self) -> bytes:
        """Return the events that begin the stream, before those of any text."""
        return b""

    @abstractmethod
    def _added(self, index: int, delta: Delta) -> bytes:
        """Return the events for `delta`, which has been added to text `index`. The end of a text is such an addition
        too."""

    @abstractmethod
    def _last(self) -> bytes:
        """Return the events at the end of the stream, after the events of all texts."""

    def _failed(self, problem: ApiError) -> bytes:
        """Return the event that reports an error."""
        return event(problem.body)


def head_of(serving: Serving, prefix: str) -> dict[str, Any]:
    """Return the fields with which the body, or each chunk of a stream, begins. Its id begins with `prefix`."""
    return {
        "id": prefix + secrets.token_hex(12),
        "created": int(time.time()),
        "model": serving.name,
        "system_fingerprint": serving.fingerprint,
    }
