"""Passes the decode loop's events to the server's thread.

loop's thread   Piece Piece  Piece  ring()   Piece  End   ring()      once a step, for all requests together
                     \\      |     /              \\     /
server's              [Piece, Piece, Piece]       [Piece, End]        all events since the last call
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from smoe.generation.loop import DecodeLoop
from smoe.generation.prompt_images import PromptImages
from smoe.generation.request import Constraint, End, EndReason, Piece, Request
from smoe.generation.sampling_settings import Sampling

Metered = Callable[[Request, Piece | End], None]
"""A function that gets every event before the request's own receiver does, on the decode loop's thread."""


class Bell:
    """Wakes the coroutines that wait for events of their texts, once for each decode step.

    Two threads that wake each other for every token slow each other down: with eight texts, by a sixth of a step.
    """

    def __init__(self) -> None:
        self._for: deque[Texts] = deque()
        self._here: asyncio.AbstractEventLoop | None = None

    def hang(self) -> None:
        """Attach the bell to the server's event loop. Called before any request."""
        self._here = asyncio.get_running_loop()

    def note(self, texts: Texts) -> None:
        """Record that `texts` has an event for which a coroutine waits. Any thread may call this."""
        if not texts.is_noted:
            texts.is_noted = True
            self._for.append(texts)

    def ring(self) -> None:
        """Wake the coroutines whose texts have events, after every step. Any thread may call this."""
        if self._for:
            self.say(self._wake)

    def say(self, what: Callable[[], None]) -> None:
        """Call the function `what` in the server's thread. Any thread may call this method."""
        if self._here is not None and not self._here.is_closed():
            self._here.call_soon_threadsafe(what)

    def _wake(self) -> None:
        while self._for:
            texts = self._for.popleft()
            texts.is_noted = False
            texts.wake()


class TextRequest(NamedTuple):
    """One text to be generated."""

    ids: Sequence[int]
    sampling: Sampling
    logprobs: int | None = None
    constraint: Constraint | None = None
    images: PromptImages | None = None
    """The images of the prompt."""


class TextEvent(NamedTuple):
    """An event of the decode loop, and the number of its text within the request."""

    number: int
    what: Piece | End


class Texts:
    """The texts of one HTTP request while they are generated. Leaving the `with` block cancels texts that have not
    ended."""

    def __init__(
        self, loop: DecodeLoop, bell: Bell, wanted: Sequence[TextRequest], metered: Metered, is_in_a_hurry: bool
    ) -> None:
        """Queue all texts of the request, or none of them: raises the errors of `DecodeLoop.hand_in`. If
        `is_in_a_hurry` is false, only the end of a text wakes the waiting coroutine."""
        self._loop, self._bell, self._metered, self._is_in_a_hurry = loop, bell, metered, is_in_a_hurry
        self._events: deque[TextEvent] = deque()
        """Events that `next` has not returned yet."""
        self._waiter: asyncio.Future[None] | None = None
        self._left = set(range(len(wanted)))
        self.is_noted = False
        """Whether the bell has noted these texts."""
        self.requests: list[Request] = []
        self.error_status: int | None = None
        """The status of the error that has ended a stream, whose own status was 200."""
        self.reasons: list[EndReason] = []
        """The reasons why the texts have ended, in the order of their ends."""
        bell.hang()
        try:
            for number, each in enumerate(wanted):
                self.requests.append(self._request(number, each))
                loop.hand_in(self.requests[-1])
        except Exception:
            self.cancel()
            raise

    def _request(self, number: int, wanted: TextRequest) -> Request:
        def receive(what: Piece | End) -> None:
            self._metered(request, what)
            self._hear(TextEvent(number, what))

        request = Request(wanted.ids, wanted.sampling, receive, wanted.logprobs, wanted.constraint, wanted.images)
        return request

    def _hear(self, event: TextEvent) -> None:
        self._events.append(event)
        if isinstance(event.what, End):
            self.reasons.append(event.what.reason)
        if self._is_in_a_hurry or isinstance(event.what, End):
            self._bell.note(self)

    @property
    def are_over(self) -> bool:
        """Whether every text has ended and `next` has returned all events."""
        return not self._left

    async def next(self, patience_seconds: float) -> list[TextEvent]:
        """Return the events that have occurred since the last call. Wait for the first one; return an empty list if
        there is none for `patience_seconds`."""
        if not self._events:
            here = asyncio.get_running_loop()
            self._waiter = here.create_future()
            timer = here.call_later(patience_seconds, self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        news = []
        while self._events:
            event = self._events.popleft()
            if event.number in self._left:
                news.append(event)
                if isinstance(event.what, End):
                    self._left.remove(event.number)
        return news

    def wake(self) -> None:
        """Wake `next`, in the server's thread."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Cancel the texts that have not ended. They end within one decode step."""
        if self._left:
            for request in self.requests:
                request.is_cancelled = True
            self._loop.wake()

    def fail(self, status: int) -> None:
        """Record the HTTP status of the error that ends the stream."""
        self.error_status = status

    def give_up(self, error: Exception) -> None:
        """End all texts with `error`, because the decode loop has failed."""
        for number in range(len(self.requests)):
            self._hear(TextEvent(number, End(EndReason.FAILED, "", error)))

    def __enter__(self) -> Texts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
