"""The API's description. Would catch one that promises what is not answered, or is silent about what is: a path, a
status, a field of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.routing import Route

from smoe.server import answers, response_answers
from smoe.server.openapi import OPERATIONS, document
from tests.server.conftest import ENDLESS, Answered, Running, served

SAID = [{"role": "user", "content": "Who went to the park?"}]
CHAT = {"model": "demo", "messages": SAID, "max_tokens": 4, "temperature": 0, "logit_bias": ENDLESS}
TEXT = {"model": "demo", "prompt": ["Once", "Tom"], "max_tokens": 4, "temperature": 0, "logit_bias": ENDLESS}
RESPONSE = {"model": "demo", "input": "Who went to the park?", "max_output_tokens": 4, "temperature": 0}


def holds(model: type[BaseModel], text: str) -> None:
    """Whether a JSON text is what a model says."""
    model.model_validate(json.loads(text))


def data_of(answer: Answered) -> list[str]:
    """What the events of a stream hold."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]


def test_every_path_and_method_is_described(running: Running) -> None:
    app: Any = running.server.config.app
    while not hasattr(app, "routes"):  # what every request passes is around it
        app = app._app
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    described = json.loads(running.http("GET", "/openapi.json").text)["paths"]
    assert {(path, method) for path, methods in described.items() for method in methods} == {
        (path, method) for path, method in routes if "." not in path or path == "/openapi.json"
    }


def test_no_validation_of_fastapi_is_promised(running: Running) -> None:
    text = running.http("GET", "/openapi.json").text
    assert "422" not in text and "HTTPValidationError" not in text
    found = json.loads(text)
    assert all(answer["description"] for path in found["paths"].values() for each in path.values()
               for answer in each["responses"].values())  # fmt: skip


def test_every_reference_leads_somewhere() -> None:
    found = document("demo", True)
    schemas = set(found["components"]["schemas"])
    named = json.dumps(found).split('"#/components/schemas/')[1:]
    assert {each.partition('"')[0] for each in named} == schemas


def test_a_key_is_described_where_there_is_one(demo: Any, demo_tokenizer: Any) -> None:
    assert "security" not in document("demo", False)
    with served(demo, demo_tokenizer, api_key="a-key") as running:
        found = json.loads(running.http("GET", "/openapi.json", Authorization="Bearer a-key").text)
        assert found["security"] == [{"bearer": []}] and "bearer" in found["components"]["securitySchemes"]
        for path, methods in found["paths"].items():
            for method, operation in methods.items():
                is_open = operation.get("security") == []
                assert ("401" in operation["responses"]) != is_open
                if method == "get":
                    assert (running.http("GET", path.replace("{name}", "demo")).status == 401) != is_open


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", CHAT, answers.ChatCompletion),
        ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}, answers.ChatCompletion),
        ("/v1/completions", TEXT, answers.TextCompletion),
        ("/v1/completions", {**TEXT, "logprobs": 2}, answers.TextCompletion),
        (
            "/v1/responses",
            {**RESPONSE, "instructions": "Short.", "metadata": {"a": "b"}},
            response_answers.ResponseAnswer,
        ),
    ],
)
def test_whole_answers_are_what_is_described(running: Running, path: str, body: Any, model: type[BaseModel]) -> None:
    answer = running.http("POST", path, body)
    assert answer.status == 200
    holds(model, answer.text)


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, answers.ChatChunk),
        ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}, answers.ChatChunk),
        ("/v1/completions", {**TEXT, "logprobs": 2}, answers.TextChunk),
        ("/v1/completions", {**TEXT, "stream_options": {"include_usage": True}}, answers.TextChunk),
        ("/v1/responses", RESPONSE, response_answers.ResponseEvent),
    ],
)
def test_events_are_what_is_described(running: Running, path: str, body: Any, model: type[BaseModel]) -> None:
    told = data_of(running.http("POST", path, {**body, "stream": True}))
    if model is not response_answers.ResponseEvent:
        assert told.pop() == "[DONE]"
    assert len(told) > 2
    for data in told:
        holds(model, data)


def test_other_answers_are_what_is_described(running: Running) -> None:
    holds(answers.Models, running.http("GET", "/v1/models").text)
    holds(answers.Model, running.http("GET", "/v1/models/demo").text)
    holds(answers.Health, running.http("GET", "/health").text)
    name = json.loads(running.http("POST", "/v1/responses", RESPONSE).text)["id"]
    holds(response_answers.ResponseAnswer, running.http("GET", f"/v1/responses/{name}").text)
    holds(answers.Deleted, running.http("DELETE", f"/v1/responses/{name}").text)
    for path in ("/v1/models/other", f"/v1/responses/{name}", "/nowhere"):
        holds(answers.Refusal, running.http("GET", path).text)
    for path in ("/metrics", "/"):
        operation = next(each for each in OPERATIONS if each.path == path)
        assert running.http("GET", path).headers["content-type"].startswith(next(iter(operation.content)))


def test_the_bounds_that_are_described_are_those_that_hold(running: Running) -> None:
    schemas = json.loads(running.http("GET", "/openapi.json").text)["components"]["schemas"]
    fields = schemas["ChatAsked"]["properties"]
    assert fields["model"]["enum"] == [None, "demo"] and "additionalProperties" not in schemas["ChatAsked"]
    assert fields["audio"]["enum"] == [None] and fields["modalities"]["enum"] == [None, ["text"]]
    for name in ("n", "temperature", "top_logprobs", "presence_penalty", "max_tokens", "seed"):
        allowed = next(each for each in fields[name]["anyOf"] if each["type"] != "null")
        for value in (allowed.get("minimum", 0) - 1, allowed.get("maximum", 2**70) + 1):
            if "maximum" in allowed or value < 1:
                answer = running.http("POST", "/v1/chat/completions", {**CHAT, name: value})
                assert (answer.status, answer.error["param"]) == (400, name)
