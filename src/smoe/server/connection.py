"""One client's connection, with a bound on all that it makes the server wait for.

connected --head_seconds--> request --body_seconds (guard.py)--> answer --unread_seconds--> idle --idle_seconds-->
                               |
                               +-- answered before its body has come: what still comes is dropped (lingering), so
                                   that a client that sends all before it reads finds the answer, and no reset
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
"""The most bytes of a body that nothing reads any more."""
_SLICE_BYTES = 8 << 10
"""Received bytes that are parsed in one turn of the event loop. A body in chunks of one byte takes 15 us for six
bytes of it: 256 KiB, which the event loop reads at once, would take 0.6 s."""
_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""A peer that has vanished without a word is noticed after two minutes, where the system lets a program say so."""


class Connection(H11Protocol):
    """uvicorn's, with time limits. `is_waiting` says whether it may make room for another."""

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
        """Bytes that have come and wait for the event loop's next turn; nothing is read meanwhile."""
        self.waiting_since = 0.0
        """When it began to be idle, or its request to come; seconds of the event loop's clock."""

    @property
    def is_idle(self) -> bool:
        """Whether it has no request under way."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_waiting(self) -> bool:
        """Whether the server waits for the client: for a request, or for the rest of one."""
        return self.is_idle or self.cycle.more_body

    @property
    def is_lingering(self) -> bool:
        """Whether it has been answered, and what still comes is dropped."""
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
        """The next slice; after the last one, the connection is read again."""
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
            self._head.start()  # at the first byte, however the rest trickles in
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
        """Answer whatever it asks, and end."""
        self.transport.write(answer)
        self._close(self.transport, has_more=True)

    def _close(self, transport: asyncio.Transport, has_more: bool = False) -> None:
        """Once everything is sent; where the client still sends, after that has been dropped."""
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
    """A time limit."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, then: Callable[[], None]) -> None:
        self._loop, self._seconds, self._then = loop, seconds, then
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self) -> None:
        """One that runs goes on."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._then)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Lingering:
    """A transport that its connection closes: uvicorn would end one at once whose client still sends, and the system
    then tells the client of a reset in the place of the answer."""

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
    """Have the system look whether the peer is still there."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
