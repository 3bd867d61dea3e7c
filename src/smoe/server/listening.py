"""The server itself, and how it ends.

first SIGTERM or Ctrl-C        no more connections; new requests get 503
      |  drain_seconds         texts under way go on
      v                        what is left is cancelled: a whole answer becomes 503, a stream ends with an error
      |  _LAST_SECONDS         for that to be written
      v                        who has not taken it is let go
second one                     the same, without drain_seconds
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from smoe.server.app import make_app
from smoe.server.body_budget import BodyBudget
from smoe.server.connection import Connection
from smoe.server.connections import Connections
from smoe.server.protocol import spoken_by
from smoe.server.serving import Serving

_log = logging.getLogger(__name__)
_LAST_SECONDS = 2
_HEAP_TICKS = 100
"""Ticks of uvicorn, ten a second, between two times that free memory is given back to the system."""
_MOST_PENDING = 1024
"""Connections that the system keeps until they are accepted."""
_SPARE_SECONDS = 10
"""After which uvicorn stops waiting for connections that should be gone by then."""

logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # it would tell stderr of each client that was let go


class Server(uvicorn.Server):
    """uvicorn, which drains before it ends. `run` returns when it has. It handles no signals: the caller forwards
    them by `handle_exit`."""

    def __init__(
        self, serving: Serving, tell: Callable[[str], None] = _log.warning, warn: Callable[[str], None] = _log.warning
    ) -> None:
        """`tell` and `warn`: print for the user who started the server."""
        self._group = Connections(serving.config, warn)
        self.bodies = BodyBudget(serving.config.most_bodies_bytes)
        """What its requests' bodies take of memory now."""
        super().__init__(
            spoken_by(
                make_app(serving, warn, self.bodies),
                http=functools.partial(Connection, group=self._group),
                backlog=self._group.room.accepted,
                timeout_keep_alive=math.ceil(serving.config.idle_seconds),
                timeout_graceful_shutdown=math.ceil(serving.config.drain_seconds) + _LAST_SECONDS + _SPARE_SECONDS,
            )
        )
        self._serving, self._tell = serving, tell
        self._is_in_a_hurry = False
        self._here: asyncio.AbstractEventLoop | None = None
        """While it ends."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        handler = functools.partial(self._group.failed, self.server_state.connections)
        asyncio.get_running_loop().set_exception_handler(handler)
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(_MOST_PENDING)  # uvicorn's backlog is also what is accepted in one turn of the event loop

    async def on_tick(self, counter: int) -> bool:
        """Whether it ends now."""
        if self._serving.config.exit_on_failure and self._serving.state == "failed":
            self.should_exit = True
        if counter % _HEAP_TICKS == 0:
            self._serving.give_back_memory()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None. uvicorn would raise them once more within its own coroutine."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None = None) -> None:
        """End the server; at the second call at once. In the thread of `run`, between any two steps of it."""
        if self.should_exit and not self._is_in_a_hurry:
            self._is_in_a_hurry = True
            if self._here is not None:
                self._here.call_soon_threadsafe(self._end_now)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what is under way go on for a while, then end it."""
        serving, self._here = self._serving, asyncio.get_running_loop()
        serving.end_soon()
        under_way, seconds = serving.running + serving.waiting, serving.config.drain_seconds
        if self._is_in_a_hurry:
            self._end_now()
        elif under_way:
            answers = "1 response" if under_way == 1 else f"{under_way} responses"
            verb = "has" if under_way == 1 else "have"
            self._tell(f"ending: {answers} in flight {verb} up to {seconds:g} s; Ctrl-C again ends them now")
        deadline = self._here.call_later(seconds, self._end_now)
        try:
            await super().shutdown(sockets)
        finally:
            self._here = None
            deadline.cancel()
            serving.end_now()

    def _end_now(self) -> None:
        self._serving.end_now()
        asyncio.get_running_loop().call_later(_LAST_SECONDS, self._let_go)

    def _let_go(self) -> None:
        """Disconnect clients that do not take what they have been sent."""
        for connection in list(self.server_state.connections):
            _log.info("closing the connection of a client that has not read its response")
            connection.transport.abort()
