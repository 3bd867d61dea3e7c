"""Bodies that are none. Would catch one that is answered without saying what is wrong with it, as an error of ours, or
not at all."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.server.conftest import Running

BODY = {"model": "demo", "prompt": "x", "max_tokens": 1}
GOOD = json.dumps(BODY).encode()
JSON = {"Content-Type": "application/json"}


def with_field(field: str) -> bytes:
    return GOOD[:-1] + b", " + field.encode() + b"}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "not JSON: Expecting property name enclosed in double quotes (line 1, column 2)"),
        (GOOD + b"x", "not JSON: Extra data"),
        (b"[1]", "must be a JSON object; it is [1]"),
        (b'"x"', 'must be a JSON object; it is "x"'),
        (b"null", "must be a JSON object; it is null"),
        (b"\xff\xfe", "not UTF-8 (byte 0 is 0xff)"),
        (b'{"model": "\xe9"}', "not UTF-8 (byte 11 is 0xe9)"),
        (GOOD.decode().encode("utf-16"), "not UTF-8"),
        (b'{"a":' * 40_000, "more than 100 levels of nested objects and lists"),
        (b"[" * 900 + b"]" * 900, "more than 100 levels of nested objects and lists"),
        (with_field('"user": ' + "[" * 101 + "]" * 101), "more than 100 levels of nested objects and lists"),
        (with_field('"seed": ' + "9" * 5000), "a number of 5000 digits"),
        (with_field('"temperature": 1e999'), "1e999, which is too large"),
        (with_field('"temperature": NaN'), "NaN is not a JSON number"),
        (with_field('"logit_bias": {"1": -Infinity}'), "-Infinity is not a JSON number"),
        (with_field('"model": "demo"'), "'model' twice in one object"),
        (with_field('"logit_bias": {"1": 1, "1": 2}'), "'1' twice in one object"),
        (with_field('"user": "\\ud800"'), r"half a character (a lone surrogate, \ud800)"),
        (with_field('"logit_bias": {"\\udfff": 1}'), r"half a character (a lone surrogate, \udfff)"),
    ],
    ids=range(21),
)
def test_bodies_that_are_none_are_refused(running: Running, body: bytes, words: str) -> None:
    answer = running.http("POST", "/v1/completions", body, **JSON)
    assert answer.status == 400 and words in answer.error["message"]
    assert len(answer.text) < 400


@pytest.mark.parametrize(
    ("headers", "code", "words"),
    [
        ({}, "unsupported_media_type", "it has no 'Content-Type'"),
        ({"Content-Type": "text/plain"}, "unsupported_media_type", "it has the type 'text/plain'"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "unsupported_media_type", "urlencoded"),
        ({"Content-Type": "application/json; charset=latin-1"}, "unsupported_media_type", "latin-1"),
        ({**JSON, "Content-Encoding": "gzip"}, "unsupported_content_encoding", "gzip"),
        ({**JSON, "Content-Encoding": "x" * 500}, "unsupported_content_encoding", "compressed"),
    ],
)
def test_bodies_in_another_form_are_not_read(running: Running, headers: Any, code: str, words: str) -> None:
    body = gzip.compress(GOOD) if "gzip" in str(headers) else GOOD
    answer = running.http("POST", "/v1/completions", body, **headers)
    assert (answer.status, answer.error["code"]) == (415, code)
    assert words in answer.error["message"] and len(answer.text) < 400


def test_bodies_in_other_words_for_the_same_form_are_read(running: Running) -> None:
    for headers in (
        {"Content-Type": "application/json; charset=UTF-8"},
        {"Content-Type": "Application/JSON", "Content-Encoding": "identity"},
        {"Content-Type": "application/vnd.api+json"},
    ):
        assert running.http("POST", "/v1/completions", GOOD, **headers).status == 200
    assert running.http("POST", "/v1/completions", b"\xef\xbb\xbf" + GOOD, **JSON).status == 200
    assert (
        running.http(
            "POST", "/v1/completions", with_field('"n": 2.0, "seed": -0.0, "temperature": 1.50'), **JSON
        ).status
        == 200
    )
    whole = with_field('"user": "\\ud83d\\ude00", "seed": ' + "0" * 1)
    assert running.http("POST", "/v1/completions", whole, **JSON).status == 200


def test_half_characters_are_refused_wherever_they_stand(running: Running) -> None:
    said = [{"role": "user", "content": "x"}]
    calls = [{"id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]  # JSON within JSON
    for fields, status, param in (
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]}, 400, "tools"),
        ({"model": "\ud800"}, 400, "model"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages"),
        ({"metadata": {"\ud800": "x"}}, 400, "metadata"),
        ({"\ud800": 1}, 400, "?"),
        ({"messages": [*said, {"role": "assistant", "tool_calls": calls}, *said]}, 200, None),
    ):
        answer = running.http(
            "POST", "/v1/chat/completions", {"model": "demo", "messages": said, "max_tokens": 1} | fields
        )
        assert answer.status == status and (status == 200 or answer.error["param"] == param)
