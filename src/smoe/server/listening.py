"""The server itself: its socket, and how it ends.

told to end (SIGTERM, Ctrl-C)  no more connections; who asks is told 503
      |  drain_seconds         texts under way go on
      v                        what is left is cancelled: a whole answer becomes 503, a stream ends with an error
a second Ctrl-C                at once
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from smoe.errors import ConfigError
from smoe.server.app import make_app
from smoe.server.serving import Serving
from smoe.server.settings import ServerConfig

_log = logging.getLogger(__name__)
_LAST_SECONDS = 10
"""For answers that were cancelled to be written."""


def bound(config: ServerConfig) -> socket.socket:
    """A socket at the server's address, which nobody hears yet: before anything heavy, as it may be taken. Raises
    `ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        door = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(address)
        except OSError:
            door.close()
            raise
    except (OSError, UnicodeError) as error:
        is_of_the_host = (
            isinstance(error, (socket.gaierror, UnicodeError)) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        )
        about = "host" if is_of_the_host else "port"
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen at `host` {config.host}, `port` {config.port}: {why}; give another `{about}`",
            setting=about,
            given=getattr(config, about),
            allowed="an address of this machine and a port that is free",
        ) from error
    return door


def address_of(door: socket.socket) -> str:
    """Where it is reached, as the beginning of a URL."""
    host, port = door.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """uvicorn, which drains before it ends. `run` returns when it has, or raises what a signal raises here."""

    def __init__(
        self, serving: Serving, tell: Callable[[str], None] = _log.warning, warn: Callable[[str], None] = _log.warning
    ) -> None:
        """`tell` and `warn`: how whoever started it is told what they should know at once."""
        super().__init__(
            uvicorn.Config(
                make_app(serving, warn),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(serving.config.drain_seconds) + _LAST_SECONDS,
            )
        )
        self._serving, self._tell = serving, tell

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal; the second one ends what is left."""
        if self.should_exit:
            self._serving.end_now()
            self.force_exit = sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what is under way go on for a while, then end it."""
        serving = self._serving
        serving.end_soon()
        under_way, seconds = serving.running + serving.waiting, serving.config.drain_seconds
        if under_way:
            answers = "1 answer" if under_way == 1 else f"{under_way} answers"
            verb = "has" if under_way == 1 else "have"
            self._tell(f"ending: {answers} under way {verb} up to {seconds:g} s; Ctrl-C again ends them now")
        deadline = asyncio.get_running_loop().call_later(seconds, serving.end_now)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
            serving.end_now()
