"""Fields that no API here has. Would catch a typing error that changes nothing without a word, a strict server that
ignores one, and names that break a header or fill the log."""

from __future__ import annotations

import inspect
import json
from typing import Any
from urllib.parse import unquote

import pytest

from smoe.server.body import UnknownFields, unknown_fields
from smoe.server.fields import ChatAsked, RequestFields
from smoe.server.message_fields import CountAsked, MessagesAsked
from smoe.server.response_fields import ResponseAsked
from smoe.server.serving import IGNORED_FIELDS
from tests.server.conftest import Running, served

SAID = [{"role": "user", "content": "x", "own": 1}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": SAID, "max_tokens": 1},
    "/v1/completions": {"model": "demo", "prompt": "x", "max_tokens": 1},
    "/v1/responses": {"model": "demo", "input": "x", "max_output_tokens": 1},
    "/v1/messages": {"model": "demo", "messages": SAID, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "demo", "messages": SAID},
}

LOCAL_BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "demo", "messages": SAID, "options": {"num_predict": 1}},
    "/api/generate": {"model": "demo", "prompt": "x", "options": {"num_predict": 1}},
    "/api/show": {"model": "demo"},
    "/tokenize": {"content": "x"},
    "/detokenize": {"tokens": [5]},
}
"""Requests of Ollama's and llama.cpp's APIs."""


@pytest.mark.parametrize("path", [*BODIES, *LOCAL_BODIES])
def test_unknown_fields_are_ignored_and_listed(running: Running, path: str) -> None:
    body = (BODIES | LOCAL_BODIES)[path]
    answer = running.http("POST", path, {**body, "temprature": 1, "söme, thing\n": 2})
    assert answer.status == 200 and IGNORED_FIELDS not in running.http("POST", path, body).headers
    assert [unquote(name) for name in answer.headers[IGNORED_FIELDS].split(",")] == ["temprature", "söme, thing\n"]


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_hides_no_wrong_one(running: Running, path: str) -> None:
    wrong = running.http("POST", path, {**BODIES[path], "temperature": 5, "temprature": 1})
    assert wrong.status == 400 and "'temperature' is 5; it must be a number between 0 and 2" in wrong.text


@pytest.mark.parametrize("path", BODIES)
def test_the_model_may_be_left_out(running: Running, path: str) -> None:
    body = {name: value for name, value in BODIES[path].items() if name != "model"}
    for left_out in (body, {**body, "model": None}):
        answer = running.http("POST", path, left_out)
        assert answer.status == 200 and json.loads(answer.text).get("model", "demo") == "demo"


def test_a_stream_lists_them_too(running: Running) -> None:
    answer = running.http("POST", "/v1/chat/completions", {**BODIES["/v1/chat/completions"], "stream": True, "best": 1})
    assert answer.status == 200 and answer.headers[IGNORED_FIELDS] == "best"


def test_tools_of_other_servers_are_ignored_and_listed(running: Running) -> None:
    body = {**BODIES["/v1/responses"], "tools": [{"type": "web_search", "external_web_access": False}], "own": 1}
    answer = running.http("POST", "/v1/responses", body)
    assert answer.status == 200 and answer.headers[IGNORED_FIELDS] == "own,tools[0]"


def test_a_strict_server_names_the_nearest_field(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer, is_strict=True) as running:
        for path, body in BODIES.items():
            answer = running.http("POST", path, {**body, "Temprature": 1})
            assert answer.status == 400
            assert "Unrecognized request argument supplied: Temprature (did you mean temperature?)" in answer.text
            assert running.http("POST", path, body).status == 200
        for path, body in LOCAL_BODIES.items():
            answer = running.http("POST", path, {**body, "own": 1})
            assert answer.status == 400 and "Unrecognized request argument supplied: own" in answer.text
            assert running.http("POST", path, body).status == 200
        search = {**BODIES["/v1/responses"], "tools": [{"type": "web_search"}]}
        answer = running.http("POST", "/v1/responses", search)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (
            400,
            "unsupported_parameter",
            "tools[0]",
        )
        wrong_option = LOCAL_BODIES["/api/chat"] | {"options": {"num_predct": 1}}
        answer = running.http("POST", "/api/chat", wrong_option)
        assert answer.status == 400 and "(did you mean options.num_predict?)" in answer.text
        wrong = {"response_format": {"type": "text", "json_shema": {}}}
        answer = running.http("POST", "/v1/chat/completions", BODIES["/v1/chat/completions"] | wrong)
        assert (answer.status, answer.error["code"]) == (400, "unknown_parameter")
        assert answer.error["param"] == "response_format.json_shema"
        assert "(did you mean response_format.json_schema?)" in answer.error["message"]


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (ChatAsked, {"messages": SAID, "stream_options": {"usage": 1}}, ["stream_options.usage"]),
        (ChatAsked, {"chat_template_kwargs": {"own": 1}, "tools": [{"own": 1}], "logit_bias": {"5": 1}}, []),
        (ChatAsked, {"response_format": {"json_schema": {"schema": {"own": 1}, "shema": 1}}},
         ["response_format.json_schema.shema"]),
        (ResponseAsked, {"text": {"form": 1}, "input": [{"own": 1}]}, ["text.form"]),
        (ChatAsked, [], []),
        (ChatAsked, {"x" * 100_000: 1}, ["x" * 80 + "..."]),
    ],
)  # fmt: skip
def test_names_say_where_the_field_is(kind: type[RequestFields], fields: Any, expected: list[str]) -> None:
    assert [field.shown for field in unknown_fields(kind, fields)] == expected


def test_each_name_is_warned_of_once() -> None:
    warnings: list[str] = []
    fields = UnknownFields(False, warnings.append)
    for _ in range(2):
        assert fields.check(ChatAsked, {"temprature": 1, "own": 2}) == ["temprature", "own"]
    later = "; further requests with it get no warning"
    assert warnings == [
        "the unknown field 'temprature' of a request is ignored (did you mean temperature?)" + later,
        "the unknown field 'own' of a request is ignored" + later,
    ]
    for number in range(1000):
        fields.check(ChatAsked, {f"{number}": 1})
    assert len(warnings) == 200


def test_the_user_who_started_the_server_is_warned(demo: Any, demo_tokenizer: Any) -> None:
    with served(demo, demo_tokenizer) as running:
        body = BODIES["/v1/responses"] | {"own": 1, "tools": [{"type": "web_search"}, {"type": "web_search"}]}
        for _ in range(2):
            running.http("POST", "/v1/responses", body)
        assert [line.partition(" of a request is ignored")[0] for line in running.told] == [
            "the unknown field 'own'", "the tool web_search"
        ]  # fmt: skip


def test_many_names_fit_in_the_header(running: Running) -> None:
    body = BODIES["/v1/completions"] | {f"{number}" + "x" * 200: 1 for number in range(100)}
    listed = running.http("POST", "/v1/completions", body).headers[IGNORED_FIELDS]
    assert listed.endswith(",and 80 more") and len(listed) < 4096


def test_every_field_of_anthropics_client_is_known() -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(api_key="none")
    for messages in (client.messages, client.beta.messages):
        for kind, method in ((MessagesAsked, messages.create), (CountAsked, messages.count_tokens)):
            fields = set(inspect.signature(method).parameters) - {
                "extra_headers", "extra_query", "extra_body", "timeout", "betas", "stream"
            }  # fmt: skip
            assert fields <= set(kind.model_fields), kind
