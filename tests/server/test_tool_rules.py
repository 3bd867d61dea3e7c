"""Grammars of calls, asked for texts that are written out. Would catch a schema whose references mean something else
within a call than alone, and a call that the form's own tokens make impossible."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from tokenizers import AddedToken

from smoe.server.grammar import Grammars
from smoe.server.problem import ApiError
from smoe.server.tool_rules import must_call
from tests.toy import END, ascii_tokenizer

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")


class Place(BaseModel):
    """One model within another: its schema is in `$defs`."""

    model_config = ConfigDict(extra="forbid")

    city: str


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    places: list[Place]


class Node(BaseModel):
    """A model within itself: its schema is a reference alone."""

    model_config = ConfigDict(extra="forbid")

    size: int
    inner: list[Node]


ITSELF = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"size": {"type": "integer"}, "inner": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["size", "inner"],
    "additionalProperties": False,
}
"""As zod writes a schema that contains itself."""
BY_PLACE = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}, "c": {"$ref": "#/definitions/D"}},
    "definitions": {"D": {"enum": ["d"]}},
    "required": ["b", "c"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def takes(form: str, tools: Sequence[dict[str, Any]], text: str, own: bool = True) -> bool:
    """Whether a model that must call one of `tools` can write `text`, and end after it."""
    tokenizer = ascii_tokenizer(added=[AddedToken(mark, special=False) for mark in MARKS] if own else [])
    end = tokenizer.convert_tokens_to_ids(END)
    marks = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS} if own else {}
    grammar = must_call(Grammars(tokenizer, len(tokenizer), [end]), form, marks, tools)
    for token in [*tokenizer(text)["input_ids"], end]:
        logits = torch.zeros(len(tokenizer))
        grammar.narrow(logits)
        if torch.isinf(logits[token]):
            return False
        grammar.take(token)
    return True


def call(name: str, arguments: Any, key: str = "parameters") -> str:
    return json.dumps({"name": name, key: arguments})


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (Trip.model_json_schema(), {"places": [{"city": "Oslo"}, {"city": "Rome"}]}, {"places": ["Oslo"]}),
        (Node.model_json_schema(), {"size": 1, "inner": [{"size": 2, "inner": []}]}, {"size": 1, "inner": [2]}),
        (ITSELF, {"size": 1, "inner": {"size": 2, "inner": None}}, {"size": 1, "inner": {"name": "f"}}),
        (BY_PLACE, {"b": 3, "c": "d"}, {"b": "three", "c": "d"}),
        ({}, {"any": ["thing"]}, ["any"]),
        (None, {}, 5),
        ({"type": ["object", "null"], "additionalProperties": False}, {}, None),
        ({"type": "object", "properties": {"x": {"const": MARKS[1]}}, "required": ["x"]}, {"x": MARKS[1]}, {"x": ""}),
    ],
    ids=range(8),
)
def test_arguments_keep_to_their_schema_as_they_would_alone(parameters: Any, good: Any, bad: Any) -> None:
    tools = [tool("other", Trip.model_json_schema()), tool("this", parameters)]
    assert takes("llama", tools, call("this", good), own=False)
    assert not takes("llama", tools, call("this", bad), own=False)
    assert not takes("llama", tools, call("third", good), own=False)


def test_definitions_of_one_name_are_each_tools_own() -> None:
    tools = [
        tool(kind, {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": kind}},
                    "required": ["x"]})
        for kind in ("integer", "string")
    ]  # fmt: skip
    assert takes("llama", tools, call("integer", {"x": 1})) and takes("llama", tools, call("string", {"x": "1"}))
    assert not takes("llama", tools, call("integer", {"x": "1"}))
    assert not takes("llama", tools, call("string", {"x": 1}))


@pytest.mark.parametrize("own", [True, False])
def test_each_form_has_its_marks(own: bool) -> None:
    tools = [tool("now", {"type": "object", "additionalProperties": False})]
    written = call("now", {}, "arguments")
    assert takes("hermes", tools, f"<tool_call>\n{written}\n</tool_call>", own)
    assert takes("mistral", tools, f"[TOOL_CALLS] [{written}]", own)
    assert takes("llama", tools, call("now", {}), own)
    assert not takes("hermes", tools, written, own)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a b", "{}", "a/b", "%json", "call_0", "\n"])
def test_a_name_may_have_any_character(name: str) -> None:
    assert takes("llama", [tool(name, {})], call(name, {}))


def test_many_tools() -> None:
    tools = [tool(f"tool_{number}", Node.model_json_schema()) for number in range(128)]
    assert takes("llama", tools, call("tool_127", {"size": 1, "inner": []}))


@pytest.mark.parametrize(
    "parameters",
    [{"type": "string"}, {"type": ["string", "null"]}, {"$ref": "#/$defs/X"}, {"type": "object", "maxProperties": "x"},
     {"description": "x" * 300_000}],
    ids=range(5),
)  # fmt: skip
def test_parameters_that_no_call_can_have_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        takes("llama", [tool("f", parameters)], "")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "tools", "invalid_json_schema")


@pytest.mark.parametrize("form", [None, "kimi", "deepseek", "deepseek-r1"])
def test_a_form_without_rules_is_refused(form: str | None) -> None:
    """Would catch a call that is enforced in the form of another family."""
    tokenizer = ascii_tokenizer()
    with pytest.raises(ApiError, match="give 'tool_choice' auto"):
        must_call(Grammars(tokenizer, len(tokenizer), [0]), form, {}, [])
