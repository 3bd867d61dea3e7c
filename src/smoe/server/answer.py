"""An answer under way: what comes of its texts, taken in one piece or shown as it comes."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from smoe.server.choice import ChoiceText, Delta
from smoe.server.events import DONE, PATIENCE_SECONDS, STILL_HERE, EventStream, Json, event, unless_gone
from smoe.server.problem import ApiError, problem_of
from smoe.server.serving import Serving
from smoe.server.texts import Texts


@dataclass(frozen=True)
class Form:
    """How an answer is written: all that it needs of a request once the request's prompt is made."""

    settings: Mapping[str, str]
    """What settings are called in the request."""
    is_streamed: bool
    wants_usage: bool
    """Whether a stream ends with the numbers of tokens."""
    has_logprobs: bool


class EndpointAnswer(ABC):
    """What the API's paths have in common."""

    done = DONE
    """What says that there are no more events."""

    def __init__(self, texts: Texts, choices: Sequence[ChoiceText], fields: Mapping[str, str]) -> None:
        """`fields`: what settings are called in the request."""
        self._texts, self._choices, self._fields = texts, list(choices), fields

    async def to(self, request: Request, is_streamed: bool) -> Response:
        """What is sent."""
        if is_streamed:
            return EventStream(self.events(), self._texts)
        return Json(await unless_gone(request, self.whole()))

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        with self._texts as texts:
            try:
                while not texts.are_over:
                    for item in await texts.next(PATIENCE_SECONDS):
                        self._keep(item.number, self._choices[item.number].take(item.what))
            except Exception as error:
                raise problem_of(error, self._fields) from error
        return self._ended()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes. What goes wrong is an event, too: the status has been sent."""
        with self._texts as texts:
            try:
                if begun := self._begun():
                    yield begun
                while not texts.are_over:
                    news, chunk = await texts.next(PATIENCE_SECONDS), b""
                    for item in news:
                        chunk += self._added(item.number, self._choices[item.number].take(item.what))
                    if chunk or not news:
                        yield chunk or STILL_HERE
                if last := self._last():
                    yield last
            except Exception as error:
                yield self._failed(problem_of(error, self._fields))
            if self.done:
                yield self.done

    def _keep(self, index: int, delta: Delta) -> None:
        """What a text gains where nothing is streamed: its choice has it already."""

    @abstractmethod
    def _ended(self) -> dict[str, Any]:
        """The finished answer."""

    def _begun(self) -> bytes:
        """Events before any text's."""
        return b""

    @abstractmethod
    def _added(self, index: int, delta: Delta) -> bytes:
        """Events of what a text has gained, and of its end."""

    @abstractmethod
    def _last(self) -> bytes:
        """Events after all texts'."""

    def _failed(self, problem: ApiError) -> bytes:
        """The event that says what went wrong."""
        return event(problem.body)


def head_of(serving: Serving, prefix: str) -> dict[str, Any]:
    """What every part of an answer begins with."""
    return {
        "id": prefix + secrets.token_hex(12),
        "created": int(time.time()),
        "model": serving.name,
        "system_fingerprint": serving.fingerprint,
    }
