"""The connections of a server: how many may be open, and which one is closed to make room for another.

A new connection replaces the one that has waited longest for its client. Clients that connect and send nothing cannot
lock out others, because a client that sends its request at once never waits longest.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil

from smoe.server.api_errors import busy
from smoe.server.connection import Connection
from smoe.server.settings import FEWEST_CONNECTIONS, ServerConfig

_log = logging.getLogger(__name__)
_MOST_ACCEPTED = 128
"""The maximum number of connections that are accepted in one turn of the event loop."""
_FEWEST_SPARE_FILES = 16
_QUIET_SECONDS = 60.0
"""The least time between two warnings of the same kind."""
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionLimit(NamedTuple):
    """How many connections the server may have open and may accept at a time, given the operating system's limit on
    open files."""

    connections: int
    accepted: int
    """Connections that may be accepted in one turn of the event loop."""


def room_for(wanted: int, files: int | None, opened: int) -> ConnectionLimit:
    """Return the numbers of connections that are allowed. `files`: the limit on open files (None: none); `opened`: the
    number of files that are open. A quarter of the remaining files is reserved for the model; half of that quarter
    bounds the accepted connections."""
    if files is None:
        return ConnectionLimit(wanted, _MOST_ACCEPTED)
    left = files - opened
    spare = max(_FEWEST_SPARE_FILES, left // 4)
    return ConnectionLimit(max(FEWEST_CONNECTIONS, min(wanted, left - spare)), min(_MOST_ACCEPTED, spare // 2))


def files_allowed() -> int | None:
    """Return how many files this process may open; None if the system has no such limit."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else int(soft)


class Connections:
    """The open connections of one server. Only the event loop's thread may call it."""

    def __init__(self, config: ServerConfig, warn: Callable[[str], None] = _log.warning) -> None:
        """`warn` prints for the user who started the server."""
        self.config, self._warn = config, warn
        opened = psutil.Process().num_fds() if psutil.POSIX else 0
        self.room = room_for(config.max_connections, files_allowed(), opened)
        if self.room.connections < config.max_connections:
            warn(
                f"this process may open {files_allowed()} files (`ulimit -n`), so at most {self.room.connections} "
                f"connections are open at once; `max_connections` is {config.max_connections}"
            )
        self._warned = -_QUIET_SECONDS

    def admit(self, connection: Connection) -> None:
        """Admit a new connection. If there is no room, close another connection, or refuse the new one."""
        if len(connection.connections) <= self.room.connections:
            return
        if not self.drop_one(connection.connections, connection):
            connection.refuse(_no_room())

    def drop_one(self, among: set[Any], spared: Connection | None = None) -> bool:
        """Close the connection that has waited longest for its client, idle ones first. Return False if all connections
        have requests in progress."""
        found = [each for each in among if isinstance(each, Connection) and each is not spared and each.is_waiting]
        if not found:
            return False
        longest = min(found, key=lambda each: (not each.is_idle, each.waiting_since))
        longest.transport.abort()
        among.discard(longest)  # the event loop removes it later, in its next turn
        return True

    def failed(self, among: set[Any], loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle exceptions of the event loop. If the process cannot open a file for a new connection, close a
        connection, and warn at most once a minute."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_FILES:
            loop.default_exception_handler(context)
            return
        self.drop_one(among)
        if loop.time() - self._warned >= _QUIET_SECONDS:
            self._warned = loop.time()
            self._warn(
                f"no file could be opened for a new connection ({error.strerror}); give a lower `max_connections` or "
                "a higher `ulimit -n`"
            )


def _no_room() -> bytes:
    """Return the bytes of a complete HTTP response of status 503."""
    problem = busy("all connections are in use; try again later")
    body = json.dumps(problem.body).encode()
    head = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    head += ["Connection: close", *(f"{name}: {value}" for name, value in problem.headers.items())]
    return "\r\n".join([*head, "", ""]).encode() + body
