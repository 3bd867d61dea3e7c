"""A text that must be a call: the grammar of one, in the form of the model's family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from smoe.server.grammar import COMPACT, Grammar, Grammars
from smoe.server.problem import refused


def must_call(
    grammars: Grammars, form: str | None, special: Mapping[int, str], tools: Sequence[dict[str, Any]]
) -> Grammar:
    """A call of one of `tools`. `special`: tokens of the form that are no text. Raises an `ApiError` where nobody here
    knows the model's form."""
    if form is None:
        message = "how this model writes calls is not known here, so it cannot be made to; give 'tool_choice' auto"
        raise refused(message, "tool_choice", "unsupported_parameter")
    key = "parameters" if form == "llama" else "arguments"
    calls = [_schema(tool["function"], key) for tool in tools]
    one = "%json " + json.dumps({"x-guidance": COMPACT, "anyOf": calls})
    marker = {text: f"<[{token}]>" for token, text in special.items()}
    if form == "hermes":
        begin, end = (marker.get(text, json.dumps(text)) for text in ("<tool_call>", "</tool_call>"))
        rules = f'start: {begin} "\\n" call "\\n" {end}\ncall: {one}\n'
    elif form == "mistral":
        begin = marker.get("[TOOL_CALLS]", '"[TOOL_CALLS]"')
        rules = f'start: {begin} " "? "[" call "]"\ncall: {one}\n'
    else:
        rules = f"start: call\ncall: {one}\n"
    return grammars.of_lark(rules, "tools")


def _schema(function: dict[str, Any], key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: function.get("parameters") or {"type": "object"}},
        "required": ["name", key],
        "additionalProperties": False,
    }
