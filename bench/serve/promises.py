"""Whether an answer is one that the server's own description allows."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError

from smoe.server import answers, local_answers, response_answers

_STATES = ("/health", "/healthz", "/ready")
"""Paths that say by 503 how the server is."""
_ANSWERS = (answers, response_answers, local_answers)
"""The modules that declare the bodies of answers."""
_EVENTS, _LINES = "text/event-stream", "application/x-ndjson"


class Promises:
    """Of one `/openapi.json`."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._paths: dict[str, Any] = document["paths"]

    def broken_by(self, method: str, path: str, status: int, kind: str, text: str) -> str | None:
        """What of it is not as described; None where all is. `path` as it is described, `kind`: the media type."""
        operation = self._paths.get(path, {}).get(method.lower())
        if status >= 500 and (status != 503 or path not in _STATES):
            return f"status {status}: {text[:300]}"
        if operation is None:
            return _broken_refusal(text) if status in (400, 403, 404, 405, 413) else f"status {status} of no such path"
        promised = operation["responses"].get(str(status))
        if promised is None:
            return f"status {status} is not described: {text[:300]}"
        if method.upper() == "HEAD":
            return None if not text else "HEAD has a body"
        content = promised["content"]
        found = next((each for name, each in content.items() if kind.startswith(name)), None)
        if found is None:
            return f"{kind} is not described for {status}"
        if kind.startswith(_EVENTS):
            return _broken_events(_model(found["x-event-data"]), text)
        if kind.startswith(_LINES):
            return _broken_lines(_model(found["x-line"]), text)
        schema = found.get("schema", {})
        return _broken(_model(schema), text) if "$ref" in schema else None


def _model(reference: dict[str, str]) -> type[BaseModel]:
    name = reference["$ref"].rsplit("/", 1)[1]
    model: type[BaseModel] = next(getattr(each, name) for each in _ANSWERS if hasattr(each, name))
    return model


def _broken(model: type[BaseModel], text: str) -> str | None:
    try:
        model.model_validate(json.loads(text))
    except (ValueError, ValidationError) as error:
        return f"no {model.__name__}: {error}; it is {text[:300]}"
    return None


def _broken_refusal(text: str) -> str | None:
    return _broken(answers.Refusal, text) if text else None


def _broken_lines(model: type[BaseModel], text: str) -> str | None:
    *lines, last = text.splitlines() or [""]
    kinds = [(line, model) for line in lines]
    kinds.append((last, local_answers.OllamaRefusal if last.startswith('{"error":') else model))
    return next((problem for line, kind in kinds if (problem := _broken(kind, line)) is not None), None)


def _broken_events(model: type[BaseModel], text: str) -> str | None:
    told = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not told:
        return "a stream of no events"
    if model is not response_answers.ResponseEvent and told.pop() != "[DONE]":
        return "a stream that does not end"
    for data in told:
        if '"server_error"' in data and ('"error"' in data):
            value = json.loads(data)
            if "error" in value or value.get("type") == "response.failed":
                return f"an error of ours in a stream: {data[:300]}"
        if data.startswith('{"error":'):
            return _broken(answers.Refusal, data)
        if (problem := _broken(model, data)) is not None:
            return problem
    return None
