"""One client's connection, with a time limit for everything that the server waits for.

connected --head_seconds--> request --body_seconds (guard.py)--> response --unread_seconds--> idle --idle_seconds-->
                               |
                               +-- response before the whole body has come: the rest is dropped (lingering). A client
                                   that reads only after sending everything gets the response, not a reset.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

if TYPE_CHECKING:
    from smoe.server.connections import Connections

LINGER_SECONDS = 10.0
_MOST_DROPPED_BYTES = 64 << 20
"""The maximum number of bytes of an unread body that are received and dropped."""
_SLICE_BYTES = 8 << 10
"""The number of received bytes that are parsed in one turn of the event loop. In chunks of one byte, six bytes of a
body take 15 us: 256 KiB, one read of the event loop, would take 0.6 s."""
_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""TCP keep-alive settings, where the system has them: a vanished peer is detected after two minutes."""


class Connection(H11Protocol):
    """A connection of uvicorn with time limits. While `is_waiting` is true, the server may close it to make room for
    another connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        group: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._group = group
        self._head = _Limit(self.loop, group.config.head_seconds, self._abort)
        self._unread = _Limit(self.loop, group.config.unread_seconds, self._abort)
        self._linger = _Limit(self.loop, LINGER_SECONDS, self._abort)
        self._dropped_bytes = 0
        self._unparsed = bytearray()
        """Received bytes that the event loop parses in later turns; reading is paused meanwhile."""
        self.waiting_since = 0.0
        """When the connection became idle or its request began to arrive, in seconds of the event loop's clock."""

    @property
    def is_idle(self) -> bool:
        """Whether the connection has no request in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for the client to send the beginning or the rest of a request."""
        return self.is_idle or self.cycle.more_body

    @property
    def is_lingering(self) -> bool:
        """Whether the response has been sent and the server drops further bytes of the request."""
        return self._linger.is_running

    # -- what the event loop calls ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = _Lingering(transport, self._close)  # type: ignore[assignment]
        self.waiting_since = self.loop.time()
        _probe(transport)
        self._head.start()
        self._group.admit(self)

    def data_received(self, data: bytes) -> None:
        if self._unparsed:
            self._unparsed += data
            self.transport.pause_reading()
            return
        self._parse(data[:_SLICE_BYTES])
        if len(data) > _SLICE_BYTES:
            self._unparsed += data[_SLICE_BYTES:]
            self.transport.pause_reading()
            self.loop.call_soon(self._parse_more)

    def _parse_more(self) -> None:
        """Parse the next slice of the received bytes. After the last slice, resume reading from the client."""
        if not self._unparsed:
            return
        data = bytes(self._unparsed[:_SLICE_BYTES])
        del self._unparsed[:_SLICE_BYTES]
        self._parse(data)
        if self._unparsed:
            self.loop.call_soon(self._parse_more)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        if self.is_lingering:
            self._drop(len(data))
            return
        super().data_received(data)
        if self.is_idle and self.conn.their_state is h11.IDLE:
            self._head.start()  # at the first byte, however slowly the rest arrives
        else:
            self._head.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unparsed.clear()
        for limit in (self._head, self._unread, self._linger):
            limit.stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.stop()

    # -- what uvicorn calls -------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self.waiting_since = self.loop.time()
        super().on_response_complete()

    def shutdown(self) -> None:
        if self.is_lingering:
            self._abort()
        else:
            super().shutdown()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def refuse(self, answer: bytes) -> None:
        """Send a response without processing the request, and close the connection."""
        self.transport.write(answer)
        self._close(self.transport, has_more=True)

    def _close(self, transport: asyncio.Transport, has_more: bool = False) -> None:
        """Close the connection after everything is sent. If the client is still sending, drop its bytes first."""
        if transport.is_closing() or not (has_more or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)):
            transport.close()
            if transport.get_write_buffer_size():
                self._unread.start()
        elif not self.is_lingering:
            self._linger.start()
            self.flow.resume_reading()
            transport.write_eof()

    def _abort(self) -> None:
        self.transport.abort()

    def _drop(self, nbytes: int) -> None:
        self._dropped_bytes += nbytes
        if self._dropped_bytes > _MOST_DROPPED_BYTES:
            self._abort()


class _Limit:
    """A timer that calls a function when its time limit is reached."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, then: Callable[[], None]) -> None:
        self._loop, self._seconds, self._then = loop, seconds, then
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self) -> None:
        """Start the timer. Has no effect while the timer runs."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._then)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Lingering:
    """A transport whose `close` calls a method of the connection instead of closing the socket at once.

    uvicorn would close a connection at once while its client still sends. The system then reports a reset to the client
    instead of the response.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[asyncio.Transport], None]) -> None:
        self._transport, self._close = transport, close
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._is_closed = True
        self._close(self._transport)

    def is_closing(self) -> bool:
        return self._is_closed or self._transport.is_closing()


def _probe(transport: asyncio.Transport) -> None:
    """Turn on TCP keep-alive for a connection, so that the system detects a client that has vanished."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
