"""The grammar that forces a text to be a tool call, in the format of the model's family.

    start: <[151657]> "\\n" call "\\n" <[151658]>        the format's own tokens, where the tokenizer has them
    call: call_0 | call_1
    call_0: "{\\"name\\": \\"warmth\\", \\"arguments\\": " arguments_0 "}"
    arguments_0: %json {...}

The parameters of each tool are a separate schema, so that references in them (`#`, `#/$defs/City`) keep their meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from smoe.server.grammar import COMPACT, Grammar, Grammars, schema_text
from smoe.server.problem import refused

_ENFORCED = ("hermes", "mistral", "llama")
"""The formats for which rules exist."""


def must_call(grammars: Grammars, form: str | None, own: Mapping[str, int], tools: Sequence[dict[str, Any]]) -> Grammar:
    """Return the grammar of a call of one of `tools`. `own`: tokens of the format's markers, by their texts. Raises an
    `ApiError` for a format without rules, or parameters that are not an object schema."""
    if form not in _ENFORCED:
        message = "this model's format of tool calls cannot be enforced; give 'tool_choice' auto"
        raise refused(message, "tool_choice", "unsupported_parameter")
    mark = {text: f"<[{token}]>" for text, token in own.items()}
    if form == "hermes":
        begin, end = (mark.get(text, _literal(text)) for text in ("<tool_call>", "</tool_call>"))
        start = f'{begin} "\\n" call "\\n" {end}'
    elif form == "mistral":
        start = f'{mark.get("[TOOL_CALLS]", _literal("[TOOL_CALLS]"))} " "? "[" call "]"'
    else:
        start = "call"
    key = "parameters" if form == "llama" else "arguments"
    rules = [f"start: {start}", "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        rules += _rules_of(tool["function"], key, number)
    return grammars.of_lark("\n".join(rules) + "\n", "tools")


def _rules_of(function: dict[str, Any], key: str, number: int) -> list[str]:
    """Return the rules for a call of one function."""
    name = json.dumps(function["name"], ensure_ascii=False)
    head = _literal(f'{{"name": {name}, "{key}": ')
    schema = schema_text({**_object_schema(function), "x-guidance": COMPACT}, "tools")
    return [f'call_{number}: {head} arguments_{number} "}}"', f"arguments_{number}: %json {schema}"]


def _object_schema(function: dict[str, Any]) -> dict[str, Any]:
    """Return a function's parameters as an object schema. Raises an `ApiError` for another type."""
    parameters = function.get("parameters") or {}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        message = f"the 'parameters' of the tool {function['name'][:80]!r} must be a schema of the type object"
        raise refused(message, "tools", "invalid_json_schema")
    return {**parameters, "type": "object"}


def _literal(text: str) -> str:
    """Return a text as a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
