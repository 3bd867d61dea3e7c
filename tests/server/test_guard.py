"""Who may ask. Would catch a page of another site that uses this machine's server, a key that opens nothing, a body
that fills the memory."""

from __future__ import annotations

import json
import socket
from typing import Any

import openai
import pytest

from smoe.server import guard
from tests.server.conftest import Running, served

KEY = "a-key-of-ours"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def test_other_names_of_this_machine_are_refused(running: Running) -> None:
    for host in ("evil.example", "evil.example:8000", "192.168.1.5", "", "localhost.evil.example"):
        answer = running.http("GET", "/v1/models", Host=host)
        assert (answer.status, answer.error["code"]) == (403, "unknown_host"), host
    for path in ("/health", "/healthz", "/ready"):
        assert running.http("GET", path, Host="evil.example").status == 200, "a probe sends the name that it has"
    for host in ("localhost", "localhost:9", "127.0.0.1", "[::1]:8000", "LOCALHOST"):
        assert running.http("GET", "/v1/models", Host=host).status == 200, host


def test_a_request_without_a_host_is_a_probe_or_is_refused_by_that_reason(running: Running) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    for path, words in (("/health", b'"ok"'), ("/v1/models", b"the request has no Host header")):
        with socket.create_connection((host, int(port)), timeout=30) as line:
            line.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            assert words in b"".join(iter(lambda: line.recv(4096), b""))


def test_pages_of_other_sites_are_refused(running: Running) -> None:
    for origin in (
        "https://evil.example",
        "null",
        "http://localhost:1",
        "http://[",
        "http://[::1",
        "//[x]",
        "[",
        "http://]",
    ):
        answer = running.http("POST", "/v1/chat/completions", BODY, Origin=origin)
        assert (answer.status, answer.error["code"]) == (403, "unknown_origin"), origin
    assert running.http("POST", "/v1/chat/completions", BODY, Origin=running.url).status == 200


def test_whoever_started_it_is_told_once_how_a_page_may_ask(
    demo: Any, demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_MOST_WARNINGS", 2)
    with served(demo, demo_tokenizer) as running:
        for origin in ("https://chat.example", "https://chat.example", "null", "https://third.example"):
            assert running.http("GET", "/v1/models", Origin=origin).status == 403
        assert running.told == [
            "a web page of https://chat.example was refused; to allow it, give `allow_origin=https://chat.example`",
            "a web page without an origin (null) was refused; only `allow_origin` * allows it",
        ]


def test_pages_may_ask_that_were_let_in(demo: Any, demo_tokenizer: Any) -> None:
    page = "https://chat.example"
    with served(demo, demo_tokenizer, allow_origin=(page,), api_key=KEY) as running:
        wishes = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        allowed = running.http("OPTIONS", "/v1/chat/completions", Origin=page, **wishes)
        assert allowed.status == 200 and allowed.headers["access-control-allow-origin"] == page
        answer = running.http("GET", "/v1/models", Origin=page, Authorization=f"Bearer {KEY}")
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == page
        assert running.http("GET", "/v1/models", Origin=page).headers["access-control-allow-origin"] == page  # a 401
        assert running.http("GET", "/v1/models", Origin="https://evil.example").status == 403


def test_a_key_is_asked_for(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, api_key=KEY) as running:
        assert running.chat().choices
        for given in ("", "Bearer", "Bearer other", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \u00e9"):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                answer = running.http("GET", path, Authorization=given)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), given
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/health", "/healthz", "/ready"):
            assert running.http("GET", path).status == 200, path
        with pytest.raises(openai.AuthenticationError):
            running.client.with_options(api_key="other").models.list()


def test_bodies_have_a_bound(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, max_body_bytes=2048) as running:
        large = json.dumps({**BODY, "user": "x" * 3000}).encode()
        answer = running.http("POST", "/v1/chat/completions", large)
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert (
            "2048 bytes" in answer.error["message"]
            and "smoe serve --max-body with a larger size" in answer.error["message"]
        )
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as line:  # nobody says how long it will be
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            line.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            assert b"413" in line.recv(100)
        assert running.chat().choices


def test_bodies_that_do_not_come_are_not_waited_for(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, body_seconds=0.05) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as line:
            line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
            assert b"408" in line.recv(100)


def test_paths_that_there_are_not_and_methods_that_they_do_not_take(running: Running) -> None:
    for path, words in (
        ("/v1/nothing", "there is no /v1/nothing here; /openapi.json lists"),
        ("/" + "x" * 3000, "x..."),
        ("/v1/models%0A", r"there is no '/v1/models\n' here"),
    ):
        answer = running.http("GET", path)
        assert answer.status == 404 and words in answer.error["message"] and len(answer.error["message"]) < 300
    for method, path, taken in (
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/", "GET, HEAD"),
        ("PUT", "/v1/responses/resp_x", "DELETE, GET, HEAD"),
        ("HEAD", "/watch", "GET"),
    ):
        answer = running.http(method, path)
        assert answer.status == 405 and answer.headers["Allow"] == taken
        if method != "HEAD":
            assert answer.error["message"] == f"{path} does not support {method}; use {taken}"
    assert running.http("GET", "/v1/models/other").status == 404


def test_base_urls_may_have_a_slash_more_or_lack_v1(running: Running) -> None:
    for path in ("/models", "//v1/models", "/v1//models", "//models/demo"):
        assert running.http("GET", path).status == 200, path
    for path in ("/chat/completions", "//v1/chat/completions", "/completions"):
        assert running.http("GET", path).status == 405, path


def test_what_is_read_may_be_asked_for_without_its_body(running: Running) -> None:
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/demo", "/openapi.json", "/main.js"):
        answer = running.http("HEAD", path)
        assert (answer.status, answer.text) == (200, "") and int(answer.headers["content-length"]) > 0, path
    assert running.http("HEAD", "/v1/responses/resp_x").status == 404
