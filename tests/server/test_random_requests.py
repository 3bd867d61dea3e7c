"""Whatever is asked, the answer is one that the API's description allows. Would catch a field whose odd values end in
an error of ours, a status or an answer that nobody was told of, a request without an answer. `python -m
bench.serve.fuzz` sends ten thousand to a server in a process of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.serve.fuzz import Fuzz
from bench.serve.odd_requests import short
from bench.serve.promises import Promises
from smoe.server.openapi import document
from tests.server.conftest import Running, eventually

KINDS = {"described, positive", "described, negative", "odd fields", "usual"}
CHAT = "/v1/chat/completions"


def test_odd_requests_are_answered_as_described(running: Running) -> None:
    fuzz = Fuzz(int(running.url.rsplit(":", 1)[1]), 120, 5)
    fuzz.run()
    assert fuzz.sent == 120 and not fuzz.found
    assert {each.partition(":")[0] for each in fuzz.statuses} >= KINDS
    assert sum(count for each, count in fuzz.statuses.items() if each.endswith(": 200")) > 10


def test_nothing_is_left_of_them(running: Running) -> None:
    eventually(lambda: running.serving.running == running.serving.waiting == 0)
    assert running.chat().choices and running.serving.state == "ok"


REFUSAL = {"error": {"message": "x", "type": "invalid_request_error", "param": None, "code": None}}


@pytest.mark.parametrize(
    ("status", "kind", "body", "words"),
    [
        (400, "application/json", REFUSAL, None),
        (422, "application/json", REFUSAL, "422 is not described"),
        (500, "application/json", REFUSAL, "status 500"),
        (400, "text/plain", REFUSAL, "text/plain is not described"),
        (400, "application/json", {"detail": "x"}, "no Refusal"),
        (400, "application/json", {"error": {"message": "x"}}, "no Refusal"),
        (200, "application/json", {"choices": []}, "no ChatCompletion"),
        (200, "text/event-stream", "data: [DONE]\n\n", None),
        (200, "text/event-stream", 'data: {"choices": []}\n\n', "does not end"),
        (200, "text/event-stream", 'data: {"choices": []}\n\ndata: [DONE]\n\n', "no ChatChunk"),
        (200, "text/event-stream", 'data: {"error": {"type": "server_error"}}\n\ndata: [DONE]\n\n', "error of ours"),
        (200, "text/event-stream", ": still here\n\n", "no events"),
    ],
)
def test_what_is_not_as_described_is_found(status: int, kind: str, body: Any, words: str | None) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    found = Promises(document("demo", False)).broken_by("POST", CHAT, status, kind, text)
    assert found is None if words is None else words in (found or "")


def test_requests_are_made_short_and_neither_right_nor_wrong() -> None:
    assert short(CHAT, {}) == {"max_tokens": 4}
    assert short(CHAT, {"max_tokens": 900, "n": 9}) == {"max_tokens": 4, "n": 3}
    assert short("/v1/responses", {"max_output_tokens": None}) == {"max_output_tokens": 4}
    assert short(CHAT, {"max_tokens": -1}) == {"max_tokens": 4}
    assert short("/api/chat", {}) == {"options": {"num_predict": 4}}
    assert short("/api/chat", {"options": {"num_predict": -2}}) == {"options": {"num_predict": 4}}
    for wrong in (
        {"max_tokens": "x"},
        {"max_tokens": -2},
        {"max_tokens": 0},
        {"max_tokens": True, "n": 129},
        {"max_tokens": 2.5, "n": -1},
        [1],
    ):
        assert short(CHAT, wrong) == wrong


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model":"demo","created_at":"x","response":"a","done":true,"done_reason":"stop"}\n', None),
        ('{"error":"x"}\n', None),
        ('{"error":"x"}\n{"error":"x"}\n', "no OllamaGenerated"),
        ('{"model":"demo","done":true}\n', "no OllamaGenerated"),
        ("", "no OllamaGenerated"),
    ],
)
def test_lines_that_are_not_as_described_are_found(text: str, words: str | None) -> None:
    found = Promises(document("demo", False)).broken_by("POST", "/api/generate", 200, "application/x-ndjson", text)
    assert found is None if words is None else words in (found or "")
