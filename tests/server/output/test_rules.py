"""Grammars of calls, asked for texts that are written out. Would catch a schema whose references mean something else
within a call than alone, and a call that the form's own tokens make impossible."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict
from tokenizers import AddedToken

from smoe.server.api_errors import ApiError
from smoe.server.grammar import Grammar, Grammars
from smoe.server.output.families import format_of
from smoe.server.output.output_reader import OutputReader
from smoe.server.output.rules import Rules
from tests.server.output.test_calls import TEMPLATES
from tests.toy import END, ascii_tokenizer

LLAMA = "<|python_tag|>"
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")


MARKED = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_calls_section_begin|>",
    "<|tool_call_argument_begin|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "｜DSML｜",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "]<]minimax[>[",
    "<arg_value>",
    "</arg_value>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "<|tool_call_start|>",
)
"""Texts of formats that are tokens of some tokenizers."""


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


def grammar_of(form: str, tools: Sequence[dict[str, Any]], marks: Sequence[str] = ()) -> tuple[Any, Grammar]:
    """A tokenizer with some marks as tokens, and its grammar of a call in the format of a chat template."""
    tokenizer = ascii_tokenizer(added=[AddedToken(mark, special=False) for mark in marks])
    end = tokenizer.convert_tokens_to_ids(END)
    own = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in marks}
    rules = format_of(form).must_call(Rules(own), [each["function"] for each in tools])
    return tokenizer, Grammars(tokenizer, len(tokenizer), [end]).of_lark(rules, "tools")


def takes(form: str, tools: Sequence[dict[str, Any]], text: str, own: bool = True) -> bool:
    """Whether a model that must call one of `tools` can write `text`, and end after it."""
    tokenizer, grammar = grammar_of(form, tools, MARKS if own else ())
    for token in [*tokenizer(text)["input_ids"], tokenizer.convert_tokens_to_ids(END)]:
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
    assert takes(LLAMA, tools, call("this", good), own=False)
    assert not takes(LLAMA, tools, call("this", bad), own=False)
    assert not takes(LLAMA, tools, call("third", good), own=False)


def test_definitions_of_one_name_are_each_tools_own() -> None:
    tools = [
        tool(kind, {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": kind}},
                    "required": ["x"]})
        for kind in ("integer", "string")
    ]  # fmt: skip
    assert takes(LLAMA, tools, call("integer", {"x": 1})) and takes(LLAMA, tools, call("string", {"x": "1"}))
    assert not takes(LLAMA, tools, call("integer", {"x": "1"}))
    assert not takes(LLAMA, tools, call("string", {"x": 1}))


@pytest.mark.parametrize("own", [True, False])
def test_each_form_has_its_marks(own: bool) -> None:
    tools = [tool("now", {"type": "object", "additionalProperties": False})]
    written = call("now", {}, "arguments")
    assert takes("<tool_call>", tools, f"<tool_call>\n{written}\n</tool_call>", own)
    assert takes("[TOOL_CALLS]", tools, f"[TOOL_CALLS][{written}]", own)
    assert takes(LLAMA, tools, call("now", {}), own)
    assert not takes("<tool_call>", tools, written, own)


@pytest.mark.parametrize("form", [form for form in TEMPLATES.values() if format_of(form).texts.isascii()])
def test_a_call_or_json_of_a_schema(form: str) -> None:
    tokenizer, found = ascii_tokenizer(), format_of(form)
    if not found.can_call_or_json({"type": "object"}):
        assert form == LLAMA and not format_of("<|python_start|>").can_call_or_json({}), "calls are bare JSON or a list"
        return
    functions = [tool("now", {"type": "object", "properties": {}, "additionalProperties": False})["function"]]
    rules = found.call_or_json(Rules({}), functions, {"type": "object", "properties": {"age": {"enum": [7]}}})
    end = tokenizer.convert_tokens_to_ids(END)
    grammar = Grammars(tokenizer, len(tokenizer), [end]).of_lark(rules, "response_format")
    for token in [*tokenizer(f'{found.answered}{{"age": 7}}')["input_ids"], end]:
        logits = torch.zeros(len(tokenizer))
        grammar.narrow(logits)
        assert not torch.isinf(logits[token])
        grammar.take(token)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a b", "{}", "a/b", "%json", "call_0", "\n"])
def test_a_name_may_have_any_character(name: str) -> None:
    assert takes(LLAMA, [tool(name, {})], call(name, {}))


def test_many_tools() -> None:
    tools = [tool(f"tool_{number}", Node.model_json_schema()) for number in range(128)]
    assert takes(LLAMA, tools, call("tool_127", {"size": 1, "inner": []}))


@pytest.mark.parametrize(
    "parameters",
    [{"type": "string"}, {"type": ["string", "null"]}, {"$ref": "#/$defs/X"}, {"type": "object", "maxProperties": "x"},
     {"description": "x" * 300_000}],
    ids=range(5),
)  # fmt: skip
def test_parameters_that_no_call_can_have_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        takes(LLAMA, [tool("f", parameters)], "")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "tools", "invalid_json_schema")


PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "area": {
            "type": "object",
            "properties": {"size": {"type": "number"}, "name": {"type": "string", "maxLength": 5}},
            "required": ["name"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        "next": {"anyOf": [{"$ref": "#/$defs/Next"}, {"type": "null"}]},
    },
    "required": ["unit", "days", "area"],
    "$defs": {"Next": {"type": "object", "properties": {"x": {"const": 1}}, "additionalProperties": False}},
    "additionalProperties": False,
}
SMALL = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


WITHOUT_TOKENS = [form for form in TEMPLATES.values() if format_of(form).texts.isascii()]


@pytest.mark.parametrize(
    ("form", "own"), [*((form, True) for form in TEMPLATES.values()), *((form, False) for form in WITHOUT_TOKENS)]
)
def test_what_a_grammar_allows_is_read_as_a_call(form: str, own: bool) -> None:
    """Random texts of each format's grammar: one call and nothing else, with arguments of the schema's types."""
    tools = [tool("warmth", PLACE), tool("now", {"type": "object", "properties": {}, "additionalProperties": False})]
    marks = [mark for mark in MARKED if mark in format_of(form).texts] if own else []
    tokenizer, first = grammar_of(form, tools, marks)
    end, choose = tokenizer.convert_tokens_to_ids(END), random.Random(7)
    plain = {token for token in range(len(tokenizer)) if tokenizer.decode([token]) in SMALL}
    for _ in range(4):
        grammar, ids = first.another(), list[int]()
        while not ids or ids[-1] != end:
            logits = torch.zeros(len(tokenizer))
            grammar.narrow(logits)
            allowed = (~torch.isinf(logits)).nonzero()[:, 0].tolist()
            others = [token for token in allowed if token not in plain]
            ids.append(choose.choice(others if others and choose.random() < 0.5 else allowed))
            grammar.take(ids[-1])
            assert len(ids) < 3000
        checked(form, tools, tokenizer.decode(ids[:-1], skip_special_tokens=False))


def checked(form: str, tools: Sequence[dict[str, Any]], text: str) -> None:
    """Assert that a text is one call, with arguments of their types."""
    offered = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    reader = OutputReader(format_of(form).reads("beginning", True), offered)
    call, *arguments = [*reader.push(text), *reader.flush()]
    assert call.kind == "call" and {part.kind for part in arguments} == {"arguments"}, text
    given = json.loads("".join(part.text for part in arguments))
    if call.text == "now":
        assert given == {}, text
        return
    types = {"city": str, "unit": str, "days": int, "exact": bool, "area": dict, "tags": list, "next": dict | None}
    assert all(isinstance(value, types[key]) for key, value in given.items()), text
    assert given.keys() >= {"unit", "days", "area"} and given["unit"] in ("C", "F"), text
    assert isinstance(given["area"]["name"], str) and all(isinstance(tag, str) for tag in given.get("tags", [])), text
