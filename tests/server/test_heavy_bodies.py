"""Bodies that cost a parser much. Would catch one that holds up everything else, and memory that grows with requests
that wait. (Before: 20,000 repeated keys took 6 s of the event loop, a million wrong items 9 s.)"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from bench.serve.heavy_bodies import HEAVY, heavy_body
from smoe.server import listening, serving
from smoe.server.api_errors import ApiError
from smoe.server.body import MOST_CONTAINERS, MOST_VALUES, UnknownFields, asked_of, check_size
from smoe.server.fields import ChatAsked, CompletionAsked
from smoe.server.guard import BodyBudget
from tests.server.conftest import Running, eventually, served

JSON = {"Content-Type": "application/json"}
MOST_BYTES = 4 << 20
HEALTH_SECONDS = 1.0
"""Ten times the bound that is wanted."""


@pytest.fixture(scope="module")
def looked_at(running: Running) -> Iterator[tuple[Running, list[float]]]:
    """A server, and how long each of its answers to /health has taken."""
    seconds, is_over = list[float](), threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            began = time.perf_counter()
            assert running.http("GET", "/health").status == 200
            seconds.append(time.perf_counter() - began)

    thread = threading.Thread(target=look)
    thread.start()
    yield running, seconds
    is_over.set()
    thread.join()


@pytest.mark.parametrize("kind", HEAVY)
def test_health_answers_while_a_heavy_body_is_read(looked_at: tuple[Running, list[float]], kind: str) -> None:
    running, seconds = looked_at
    path, body = heavy_body(kind, "demo", MOST_BYTES - 1024)
    seconds.clear()
    answer = running.http("POST", path, body, **JSON)
    eventually(lambda: bool(seconds))
    assert answer.status == 400 and len(answer.text) < 600, answer.text[:300]
    assert max(seconds) < HEALTH_SECONDS


@pytest.mark.parametrize("kind", HEAVY)
def test_a_heavy_body_takes_linear_time(kind: str) -> None:
    taken = []
    for nbytes in (MOST_BYTES // 8, MOST_BYTES):
        path, body = heavy_body(kind, "demo", nbytes)
        began = time.perf_counter()
        with suppress(ApiError):
            asked_of(CompletionAsked if path == "/v1/completions" else ChatAsked, body, UnknownFields(False))
        taken.append(time.perf_counter() - began)
    assert taken[1] < 10 * 8 * taken[0] + 1.0


def test_the_first_error_alone_is_reported() -> None:
    body = json.dumps({"model": "demo", "prompt": [[1, 2], *[["x"]] * 100, 3]}).encode()
    with pytest.raises(ApiError) as refused:
        asked_of(CompletionAsked, body, UnknownFields(False))
    assert refused.value.param == "prompt"
    names = b", ".join(b'"n%d": 1' % number for number in range(5000))
    with pytest.raises(ApiError, match="an object of more than 4096 fields"):
        asked_of(CompletionAsked, b"{" + names + b"}", UnknownFields(False))


@pytest.mark.parametrize(
    ("data", "is_small"),
    [
        (b"[" + b"{}," * (MOST_CONTAINERS - 2) + b"1]", True),
        (b"[" + b"{}," * (MOST_CONTAINERS + 1) + b"1]", False),
        (b"[" + b"1," * (MOST_VALUES - 1) + b"1]", True),
        (b"[" + b"1," * MOST_VALUES + b"1]", False),
        (b'"' + b"[{,," * MOST_VALUES + b'"', True),
        (b'["' + rb"\"[{,\\" * MOST_VALUES + b'", 1]', True),
        (b'["\\\\"' + b",[]" * (MOST_CONTAINERS + 1) + b"]", False),
        (b'["' + b"x" * 70_000 + b'"' + b",[]" * (MOST_CONTAINERS + 1) + b"]", False),
    ],
    ids=range(8),
)
def test_values_are_counted_outside_of_strings(data: bytes, is_small: bool) -> None:
    if is_small:
        check_size(data)
        return
    with pytest.raises(ApiError, match="more than 50000 objects and lists"):
        check_size(data)


def test_a_budget_gives_back_what_it_gave() -> None:
    budget = BodyBudget(100)
    first, second = budget.admit(60), budget.admit(60)
    first.add(60)
    with pytest.raises(ApiError) as busy:
        second.add(60)
    assert (busy.value.status, busy.value.headers) == (429, {"Retry-After": "2"})
    with pytest.raises(ApiError):
        budget.admit(41)
    first.release()
    first.release()
    second.add(100)
    assert budget.held_bytes == 100


def test_bodies_in_memory_have_a_bound(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, max_body_bytes=40_000, max_bodies_bytes=50_000) as running:
        host, port = running.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        bodies = running.server.bodies
        with socket.create_connection((host, int(port)), timeout=30) as line:
            line.sendall(f"{head}Content-Length: 39000\r\n\r\n".encode() + b" " * 30_000)
            eventually(lambda: bodies.held_bytes == 30_000)
            refused = running.http("POST", "/v1/completions", b"x" * 30_000, **JSON)
            assert (refused.status, refused.headers["Retry-After"]) == (429, "2")
            assert refused.error["type"] == "rate_limit_error"
            assert running.http("GET", "/health").status == 200 and running.chat().choices
        eventually(lambda: bodies.held_bytes == 0)
        assert running.http("POST", "/v1/completions", b" " * 30_000, **JSON).status == 400


def test_a_request_that_waits_holds_no_body(running: Running) -> None:
    """Its prompt is tokens by then."""
    said = [{"type": "text", "text": ""}] * 10_000
    stream = running.chat(messages=[{"role": "user", "content": [*said, {"type": "text", "text": "x"}]}], stream=True)
    assert running.server.bodies.held_bytes == 0
    assert list(stream)


def test_memory_is_given_back_after_bodies(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = list[str]()
    monkeypatch.setattr(listening, "_HEAP_TICKS", 1 << 30)  # by no tick, also after the bodies of earlier tests
    monkeypatch.setattr(serving, "give_back_heap", lambda: given_back.append(threading.current_thread().name))
    assert running.http("POST", "/v1/completions", b"{}", **JSON).status == 400
    running.serving.give_back_memory()
    eventually(lambda: given_back == ["smoe-prompts_0"])
    running.serving.give_back_memory()
    assert running.http("POST", "/v1/completions", b"{}", **JSON).status == 400  # by the same thread, one by one
    assert len(given_back) == 1, "nothing was read since the last time"
    monkeypatch.setattr(listening, "_HEAP_TICKS", 1)
    eventually(lambda: given_back == ["smoe-prompts_0"] * 2)
