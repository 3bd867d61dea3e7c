"""The content of `/openapi.json`: every path with its requests and responses.

The content is declared here and not derived from the route functions: errors have one form per API and mostly occur
before a route is called (`guard.py`), and a response may be a stream.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from smoe import __version__
from smoe.server import answers, response_answers
from smoe.server import local_answers as local
from smoe.server.body import AskedFields
from smoe.server.fields import (
    ChatAsked,
    CompletionAsked,
)
from smoe.server.message_fields import CountAsked, MessagesAsked
from smoe.server.ollama_fields import OllamaChatAsked, OllamaGenerateAsked, OllamaShowAsked
from smoe.server.response_fields import ResponseAsked
from smoe.server.serving import IGNORED_FIELDS
from smoe.server.token_fields import DetokenizeAsked, TokenizeAsked

METRICS_TYPE = "text/plain; version=0.0.4"
_JSON, _EVENTS, _LINES = "application/json", "text/event-stream", "application/x-ndjson"
_PARTS = {_EVENTS: "x-event-data", _LINES: "x-line"}
"""{media type of a stream: the extension key of its schema, for the data of one event or for one line}."""
_REF = "#/components/schemas/{model}"
_REFUSALS = {
    400: "The request is invalid or cannot be served; `param` names the field.",
    401: "The key is missing or wrong.",
    403: "The request's host name, or the origin of the web page, is not allowed.",
    404: "The model, or the response, does not exist.",
    408: "The body was not received in time.",
    413: "The body is larger than allowed.",
    415: "The body is not sent as JSON, or is compressed.",
    429: "The queue, or the memory for request bodies, is full; `Retry-After` gives the time to wait.",
    500: "The server failed; only this request is lost.",
    501: "The model has no embeddings, or the server does not manage models.",
    503: "The server is shutting down, its model can no longer be used, or all connections are in use.",
}
_IGNORED = {"description": "Unknown fields of the request, which were ignored.", "schema": {"type": "string"}}
_OF_ALL = (403, 408, 413, 429, 500, 503)
_OF_ASKING = (400, 404, 415)
_ABOUT = """\
The API follows OpenAI's, Anthropic's at `/v1/messages`, and Ollama's at `/api`. Errors have one form, `Refusal`, or
Anthropic's, `MessageRefusal`, or Ollama's, `OllamaRefusal`. In addition to the listed errors, an unknown path returns
404, and an unsupported method 405. A stream's status is sent before its first event: a later error is an event,
`data: {"error": ...}`, or `response.failed` in streams of responses, `error` in streams of messages, or a line of
Ollama's streams.
"""


_OF_TEXT = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/api/chat",
    "/api/generate",
)
"""The paths of requests for text."""


@dataclass(frozen=True)
class Operation:
    """An operation of the API: one HTTP method of one path."""

    method: str
    path: str
    summary: str
    content: dict[str, Any]
    """{media type: content of the response of status 200}. The content is a model, or a description."""
    asked: type[AskedFields] | None = None
    refusals: tuple[int, ...] = ()
    """The HTTP statuses of this operation's errors, in addition to those of every path."""
    others: dict[int, type[BaseModel]] = field(default_factory=dict)
    """{HTTP status: model of the error body}, for errors whose body is not a `Refusal`."""
    is_open: bool = False
    """Whether the path needs no key."""
    takes_head: bool = True
    """For a GET: whether HEAD is supported as well."""

    @property
    def generates_text(self) -> bool:
        """Whether a request to this operation asks the model for text."""
        return self.path in _OF_TEXT


_MESSAGE_REFUSALS: dict[int, type[BaseModel]] = dict.fromkeys((*_OF_ALL, *_OF_ASKING), answers.MessageRefusal)


def _ollama(method: str, path: str, summary: str, content: dict[str, Any], asked: Any = None) -> Operation:
    """Return the description of a path of Ollama's API, whose errors have a form of their own."""
    statuses = _OF_ALL if asked is None else (*_OF_ALL, *_OF_ASKING)
    return Operation(method, path, summary, content, asked, others=dict.fromkeys(statuses, local.OllamaRefusal))


def _no_embeddings(path: str, refusal: type[BaseModel]) -> Operation:
    return Operation("post", path, "Embeddings, which the model does not have.", {}, others={501: refusal})


def _no_management(path: str, method: str = "post") -> Operation:
    summary = "Management of models, which the server does not support: it has one model."
    return Operation(method, path, summary, {}, others={501: local.OllamaRefusal})


def _probe(path: str, summary: str) -> Operation:
    """Return the description of a health check, which needs no key and has the same kind of body for every status."""
    return Operation("get", path, summary, {_JSON: answers.Health}, others={503: answers.Health}, is_open=True)


OPERATIONS = (
    Operation("get", "/v1/models", "The model that is served.", {_JSON: answers.Models}),
    Operation("get", "/v1/models/{name}", "The model of this name.", {_JSON: answers.Model}, refusals=(404,)),
    Operation(
        "post",
        "/v1/chat/completions",
        "Continue a conversation.",
        {_JSON: answers.ChatCompletion, _EVENTS: answers.ChatChunk},
        ChatAsked,
        _OF_ASKING,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue texts.",
        {_JSON: answers.TextCompletion, _EVENTS: answers.TextChunk},
        CompletionAsked,
        _OF_ASKING,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Continue a conversation, by Anthropic's API.",
        {_JSON: answers.MessageAnswer, _EVENTS: answers.MessageEvent},
        MessagesAsked,
        _OF_ASKING,
        _MESSAGE_REFUSALS,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        {_JSON: answers.TokenCount},
        CountAsked,
        _OF_ASKING,
        _MESSAGE_REFUSALS,
    ),
    Operation(
        "post",
        "/v1/responses",
        "Continue a conversation; later requests can continue it by its id.",
        {_JSON: response_answers.ResponseAnswer, _EVENTS: response_answers.ResponseEvent},
        ResponseAsked,
        _OF_ASKING,
    ),
    Operation(
        "get",
        "/v1/responses/{name}",
        "A stored response.",
        {_JSON: response_answers.ResponseAnswer},
        refusals=(404,),
    ),
    Operation("delete", "/v1/responses/{name}", "Delete a stored response.", {_JSON: answers.Deleted}, refusals=(404,)),
    _ollama(
        "post",
        "/api/chat",
        "Continue a conversation, by Ollama's API.",
        {_JSON: local.OllamaChat, _LINES: local.OllamaChat},
        OllamaChatAsked,
    ),
    _ollama(
        "post",
        "/api/generate",
        "Answer a prompt, by Ollama's API.",
        {_JSON: local.OllamaGenerated, _LINES: local.OllamaGenerated},
        OllamaGenerateAsked,
    ),
    _ollama("post", "/api/show", "What is known of the model.", {_JSON: local.OllamaShown}, OllamaShowAsked),
    _ollama("get", "/api/tags", "The model that is served.", {_JSON: local.OllamaModels}),
    _ollama("get", "/api/ps", "The model that is loaded.", {_JSON: local.OllamaModels}),
    _ollama("get", "/api/version", "The version of Ollama's API that is followed.", {_JSON: local.OllamaVersion}),
    Operation("post", "/tokenize", "The tokens of a text.", {_JSON: local.Tokens}, TokenizeAsked, _OF_ASKING),
    Operation("post", "/detokenize", "The text of tokens.", {_JSON: local.TokensText}, DetokenizeAsked, _OF_ASKING),
    Operation("get", "/props", "The server's properties, as llama.cpp has them.", {_JSON: local.Properties}),
    _no_embeddings("/v1/embeddings", answers.Refusal),
    _no_embeddings("/api/embed", local.OllamaRefusal),
    _no_embeddings("/api/embeddings", local.OllamaRefusal),
    *map(_no_management, ("/api/pull", "/api/push", "/api/create", "/api/copy")),
    _no_management("/api/delete", "delete"),
    _probe("/health", "Whether the server responds."),
    _probe("/healthz", "Whether the process works (also while it shuts down); otherwise restart it."),
    _probe("/ready", "Whether the server accepts requests."),
    Operation("get", "/metrics", "Metrics in Prometheus's format.", {METRICS_TYPE: "Prometheus's text form."}),
    Operation("get", "/openapi.json", "This description.", {_JSON: {"schema": {"type": "object"}}}),
    Operation(
        "get",
        "/watch",
        "What the engine does: the page's events, `model` once and `look` up to ten times a second.",
        {_EVENTS: {}},
        takes_head=False,
    ),
    Operation("get", "/", "The web page.", {"text/html; charset=utf-8": "HTML."}, is_open=True),
)


@functools.cache
def document(model: str, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of a server of one model. The caller must not change the description."""
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        described = _described(each, needs_key)
        paths.setdefault(each.path, {})[each.method] = described
        if each.method == "get" and each.takes_head:
            answered = {
                status: {"description": found["description"]} for status, found in described["responses"].items()
            }
            paths[each.path]["head"] = {**described, "summary": f"{each.summary} Headers only.", "responses": answered}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "smoe", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": _schemas(model),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "The key of this server, if it has one."}
            },
        },
    }
    return found | ({"security": [{"bearer": []}]} if needs_key else {})


def _described(operation: Operation, needs_key: bool) -> dict[str, Any]:
    statuses = {*_OF_ALL, *operation.refusals, *((401,) if needs_key and not operation.is_open else ())}
    events, lines = (operation.content.get(kind) for kind in _PARTS)
    description = "The result."
    if isinstance(events, type):
        description = f"The result; with `stream` true, events whose data is a `{events.__name__}`."
    elif isinstance(lines, type):
        description = f"The result; unless `stream` is false, lines that are each a `{lines.__name__}`."
    responses: dict[str, Any] = {}
    if operation.content:
        responses["200"] = {"description": description, "content": _content(operation.content)}
    if operation.asked is not None:
        responses["200"]["headers"] = {IGNORED_FIELDS: _IGNORED}
    responses |= {
        str(status): {"description": _REFUSALS[status], "content": _content({_JSON: operation.others[status]})}
        for status in operation.others
    }
    responses |= {str(status): _refusal(status) for status in statuses - operation.others.keys()}
    found: dict[str, Any] = {"summary": operation.summary, "responses": dict(sorted(responses.items()))}
    if "{name}" in operation.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        found["parameters"] = [name]
    if operation.asked is not None:
        found["requestBody"] = {"required": True, "content": _content({_JSON: operation.asked})}
    if operation.is_open and needs_key:
        found["security"] = []
    return found


def _refusal(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {"description": _REFUSALS[status], "content": _content({_JSON: answers.Refusal})}
    if status == 401:
        found["headers"] = {"WWW-Authenticate": {"description": "`Bearer`.", "schema": {"type": "string"}}}
    if status in (429, 503):
        found["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return found


def _content(kinds: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, what in kinds.items():
        if isinstance(what, str):
            found[kind] = {"schema": {"type": "string", "description": what}}
        elif isinstance(what, dict):
            found[kind] = what
        elif kind in _PARTS:  # OpenAPI 3.1 cannot describe them
            found[kind] = {_PARTS[kind]: {"$ref": _REF.format(model=what.__name__)}}
        else:
            found[kind] = {"schema": {"$ref": _REF.format(model=what.__name__)}}
    return found


def _schemas(model: str) -> dict[str, Any]:
    """Return the schemas of all models in use; the field `model` of requests allows the served model only."""
    kinds: list[type[BaseModel]] = [answers.Refusal]
    for each in OPERATIONS:
        asked = [] if each.asked is None else [each.asked]
        kinds += [kind for kind in (*each.content.values(), *each.others.values(), *asked) if isinstance(kind, type)]
    _, found = models_json_schema([(kind, "validation") for kind in dict.fromkeys(kinds)], ref_template=_REF)
    schemas: dict[str, Any] = found["$defs"]
    for each in OPERATIONS:
        if each.asked is not None and not each.asked.takes_any_model and "model" in each.asked.model_fields:
            names = [model + tag for tag in each.asked.tags]
            schemas[each.asked.__name__]["properties"]["model"] |= {"enum": [None, *names]}
    return schemas
