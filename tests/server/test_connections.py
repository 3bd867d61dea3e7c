"""Clients that connect and say nothing, or never finish. Would catch one that keeps others out, a connection that stays
for ever, and an answer that is lost because the client still sends."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from smoe.server import connection
from smoe.server.connection import _SLICE_BYTES
from smoe.server.connections import ConnectionLimit, Connections, room_for
from smoe.server.settings import ServerConfig
from tests.server.conftest import Running, eventually, served

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextmanager
def line_to(running: Running) -> Iterator[socket.socket]:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        yield line


def is_ended(line: socket.socket) -> bool:
    """Whether the server ends it within the socket's timeout."""
    try:
        while line.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n", b"\r\n", HEAD + b"X: " + b"x" * 9000],
    ids=["nothing", "half a line", "half a head", "an empty line", "a long header"],
)
def test_a_head_that_does_not_come_is_not_waited_for(
    demo: Any, demo_tokenizer: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is none at all is answered; then the client has its time to read that."""
    monkeypatch.setattr(connection, "LINGER_SECONDS", 0.1)
    with served(demo, demo_tokenizer, head_seconds=0.1) as running, line_to(running) as line:
        line.sendall(sent)
        assert is_ended(line)
        eventually(lambda: not running.server.server_state.connections)


def test_a_head_that_trickles_in_is_not_waited_for(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, head_seconds=0.3) as running, line_to(running) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # the first request is whole
        answer = b""
        while b'"ok"' not in answer:  # head and body may come in two pieces
            piece = line.recv(65536)
            assert piece, answer
            answer += piece
        end = time.monotonic() + 30
        with pytest.raises(OSError):
            while time.monotonic() < end:
                line.sendall(b"X")
                time.sleep(0.02)


def test_an_idle_connection_is_closed(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, idle_seconds=1.0) as running, line_to(running) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert is_ended(line)


def test_silent_connections_keep_nobody_out(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, max_connections=8) as running, ExitStack() as stack:
        for number in range(60):
            line = stack.enter_context(line_to(running))
            if number % 3 == 1:
                line.sendall(HEAD)
            elif number % 3 == 2:
                line.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert running.http("GET", "/health").status == 200
        assert running.chat().choices
        assert len(running.server.server_state.connections) <= 9


def test_connections_that_are_answered_are_not_ended_for_others(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, max_connections=8) as running, ExitStack() as stack:
        watchers = []
        for _ in range(8):
            watchers.append(stack.enter_context(line_to(running)))
            watchers[-1].sendall(b"GET /watch HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert watchers[-1].recv(100)
        refused = running.http("GET", "/health")
        assert refused.status == 503 and refused.headers["Retry-After"] == "2"
        assert "all connections are in use" in refused.error["message"]
        watchers[0].close()
        eventually(lambda: len(running.server.server_state.connections) < 8)
        assert running.http("GET", "/health").status == 200


@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("nbytes", [3 << 20, 20 << 20])
def test_a_client_that_sends_all_before_it_reads_finds_the_refusal(
    demo: Any, demo_tokenizer: Any, headers: bytes, nbytes: int
) -> None:
    with served(demo, demo_tokenizer, max_body_bytes=2048) as running:
        for more, status in ((b"", b"413"), (b"Origin: https://evil.example\r\n", b"403")):
            with line_to(running) as line:
                line.sendall(HEAD + headers + more + b"Content-Length: %d\r\n\r\n" % nbytes)
                for _ in range(nbytes // 65536):
                    line.sendall(b"x" * 65536)
                time.sleep(0.05)
                answer = http.client.HTTPResponse(line)
                answer.begin()
                assert answer.status == int(status) and json.loads(answer.read())["error"]["message"]
                assert answer.headers["Connection"] == "close"
        assert running.chat().choices


def test_a_client_that_never_reads_is_let_go_in_time(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, unread_seconds=0.3) as running, line_to(running) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        eventually(lambda: len(running.server.server_state.connections) == 1)
        eventually(lambda: len(running.server.server_state.connections) == 0)


@pytest.mark.parametrize(
    ("wanted", "files", "opened", "room"),
    [
        (512, None, 50, ConnectionLimit(512, 128)),
        (512, 1024, 60, ConnectionLimit(512, 120)),
        (512, 256, 60, ConnectionLimit(147, 24)),
        (512, 64, 60, ConnectionLimit(8, 8)),
        (20, 1 << 20, 60, ConnectionLimit(20, 128)),
    ],
)
def test_some_files_are_left_to_the_model(wanted: int, files: int | None, opened: int, room: ConnectionLimit) -> None:
    assert room_for(wanted, files, opened) == room


def test_a_lack_of_files_is_one_line_a_minute() -> None:
    warned: list[str] = []
    group = Connections(ServerConfig(), warned.append)
    loop = asyncio.new_event_loop()
    try:
        for number in (errno.EMFILE, errno.ENFILE, errno.EMFILE):
            group.failed(set(), loop, {"message": "x", "exception": OSError(number, "Too many open files")})
        assert len(warned) == 1 and "`ulimit -n`" in warned[0]
    finally:
        loop.close()


def test_a_body_in_tiny_chunks_is_parsed_in_slices(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a turn of the event loop that takes as long as 256 KiB of them do, half a second."""
    lengths = list[int]()
    parse = H11Protocol.data_received

    def noted(connection: H11Protocol, data: bytes) -> None:
        lengths.append(len(data))
        parse(connection, data)

    monkeypatch.setattr(H11Protocol, "data_received", noted)
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1, "user": "u" * 20_000}).encode()
    with line_to(running) as line:
        line.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        line.sendall(b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n")
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := line.recv(65536):
            answer += piece
    assert answer.count(b"HTTP/1.1 200") == 2, answer[:500]
    assert sum(lengths) > 6 * len(body) and max(lengths) <= _SLICE_BYTES
