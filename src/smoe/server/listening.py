"""The HTTP server and its shutdown.

first SIGTERM or Ctrl-C        no more connections; new requests get 503
      |  drain_seconds         texts in progress continue
      v                        the rest is cancelled: a whole response becomes 503, a stream ends with an error
      |  _LAST_SECONDS         for these errors to be sent
      v                        clients that have not read them are disconnected
second SIGTERM or Ctrl-C       the same, without waiting for drain_seconds
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
from smoe.server.connection import Connection
from smoe.server.connections import Connections
from smoe.server.guard import BodyBudget
from smoe.server.protocol import spoken_by
from smoe.server.serving import Serving

_log = logging.getLogger(__name__)
_LAST_SECONDS = 2
_HEAP_TICKS = 100
"""The number of uvicorn's ticks, ten a second, between two returns of free memory to the system."""
_MOST_PENDING = 1024
"""The maximum number of connections that the system queues until they are accepted."""
_SPARE_SECONDS = 10
"""The time after which uvicorn stops waiting for connections that should have ended by then."""

logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # else stderr has a line for each disconnection


class Server(uvicorn.Server):
    """A server of uvicorn that lets texts in progress finish before `run` returns. It installs no signal handlers: the
    caller passes signals to `handle_exit`."""

    def __init__(
        self, serving: Serving, tell: Callable[[str], None] = _log.warning, warn: Callable[[str], None] = _log.warning
    ) -> None:
        """`tell` and `warn` print for the user who started the server."""
        self._group = Connections(serving.config, warn)
        self.bodies = BodyBudget(serving.config.most_bodies_bytes)
        """The account of the memory that request bodies take."""
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
        """The event loop while the server shuts down; None before."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        handler = functools.partial(self._group.failed, self.server_state.connections)
        asyncio.get_running_loop().set_exception_handler(handler)
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(_MOST_PENDING)  # uvicorn's backlog is the number accepted in one turn

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server must end now. uvicorn calls this method ten times a second."""
        if self._serving.config.exit_on_failure and self._serving.state == "failed":
            self.should_exit = True
        if counter % _HEAP_TICKS == 0:
            self._serving.give_back_memory()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: uvicorn's would raise the signals again within its own coroutine."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None = None) -> None:
        """Begin to shut down; at a second call, shut down without waiting for texts in progress. Called in the thread
        of `run`, between any two instructions."""
        if self.should_exit and not self._is_in_a_hurry:
            self._is_in_a_hurry = True
            if self._here is not None:
                self._here.call_soon_threadsafe(self._end_now)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests in progress continue for `drain_seconds`, then cancel them."""
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
        """Disconnect clients that have not read the data that was sent to them."""
        for connection in list(self.server_state.connections):
            _log.info("closing the connection of a client that has not read its response")
            connection.transport.abort()
