"""What the decode loop's thread says of one request's texts, brought to the server's.

loop's thread   Piece  Piece  Piece  End        one call each, which returns at once
                  \\     |     /     /
server's        [Piece, Piece, Piece]  [End]    as much as has come by the time it looks
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from smoe.generation.loop import DecodeLoop
from smoe.generation.request import Constraint, End, Piece, Reason, Request
from smoe.generation.sampling import Sampling

Metered = Callable[[Request, Piece | End], None]
"""Hears everything first, on the loop's thread."""


class Wanted(NamedTuple):
    """One text to be made."""

    ids: Sequence[int]
    sampling: Sampling
    logprobs: int | None = None
    constraint: Constraint | None = None


class Heard(NamedTuple):
    """What was said, and of which text."""

    number: int
    what: Piece | End


class Texts:
    """The texts of one HTTP request. Whoever leaves its `with` cancels those that have not ended."""

    def __init__(self, loop: DecodeLoop, wanted: Sequence[Wanted], metered: Metered) -> None:
        """Hands all of them in, or none: raises what `DecodeLoop.hand_in` does."""
        self._loop, self._metered = loop, metered
        self._here = asyncio.get_running_loop()
        self._heard: list[Heard] = []
        self._waiter: asyncio.Future[None] | None = None
        self._left = set(range(len(wanted)))
        self.requests: list[Request] = []
        try:
            for index, each in enumerate(wanted):
                self.requests.append(self._request(index, each))
                loop.hand_in(self.requests[-1])
        except Exception:
            self.cancel()
            raise

    def _request(self, index: int, wanted: Wanted) -> Request:
        def hear(what: Piece | End) -> None:
            self._metered(request, what)
            self._here.call_soon_threadsafe(self._take, Heard(index, what))

        request = Request(wanted.ids, wanted.sampling, hear, wanted.logprobs, wanted.constraint)
        return request

    @property
    def are_over(self) -> bool:
        """Whether every text has ended, and all that was said has been taken."""
        return not self._left and not self._heard

    async def next(self, patience_seconds: float) -> list[Heard]:
        """What has been said since the last call; empty where nothing was for so long."""
        if not self._heard:
            self._waiter = self._here.create_future()
            timer = self._here.call_later(patience_seconds, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        heard, self._heard = self._heard, []
        return heard

    def cancel(self) -> None:
        """End what has not ended, within a step."""
        if self._left:
            for request in self.requests:
                request.is_cancelled = True
            self._loop.wake()

    def give_up(self, error: Exception) -> None:
        """The loop has failed: nobody will say more."""
        for index in range(len(self.requests)):
            self._here.call_soon_threadsafe(self._take, Heard(index, End(Reason.FAILED, "", error)))

    def __enter__(self) -> Texts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _take(self, heard: Heard) -> None:
        if heard.number in self._left:
            self._heard.append(heard)
            if isinstance(heard.what, End):
                self._left.remove(heard.number)
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
