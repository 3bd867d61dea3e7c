"""The tools of `/v1/responses` as functions, which are the only tools that chat templates have.

| tool | function that the model gets |
| --- | --- |
| a function, or one in a namespace | the same; in a namespace by the name `namespace.function` |
| `custom` | a function of one text, `input` |
| `local_shell` | `local_shell(command, working_directory, env, timeout_ms)` |
| `shell` | `shell(commands, timeout_ms, max_output_length)` |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from smoe.server.api_errors import refused
from smoe.server.lark_pattern import pattern_of_lark
from smoe.server.output.parameters import WHOLE_PATTERN
from smoe.server.response_fields import HOSTED_TOOLS

_INPUT = "input"
_INTEGER, _STRING = {"type": "integer"}, {"type": "string"}
_STRINGS = {"type": "array", "items": _STRING}
SHELLS: dict[str, dict[str, Any]] = {
    "local_shell": {
        "name": "local_shell",
        "description": "Runs one command, without a shell, on the user's machine, and returns its output. For a shell "
        'give ["bash", "-lc", "..."].',
        "parameters": {
            "type": "object",
            "properties": {
                "command": {**_STRINGS, "description": "The program and its arguments."},
                "working_directory": _STRING,
                "env": {"type": "object", "additionalProperties": _STRING, "description": "Environment variables."},
                "timeout_ms": _INTEGER,
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    "shell": {
        "name": "shell",
        "description": "Runs shell commands on the user's machine, and returns the output of each.",
        "parameters": {
            "type": "object",
            "properties": {
                "commands": {**_STRINGS, "description": "Commands, each as a line of the shell."},
                "timeout_ms": _INTEGER,
                "max_output_length": _INTEGER,
            },
            "required": ["commands"],
            "additionalProperties": False,
        },
    },
}
"""{type of a tool: the function that the model gets for it}."""


class ToolOrigin(NamedTuple):
    """The tool of a request for which the model gets a function."""

    kind: str = "function"
    """`function`, `custom`, `local_shell` or `shell`."""
    name: str | None = None
    """The tool's name in its namespace; None: the function's name."""
    namespace: str | None = None


@dataclass
class OfferedTools:
    """The tools of one request, as functions."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """The functions that the model gets, in the form of chat completions."""
    origins: dict[str, ToolOrigin] = field(default_factory=dict)
    """{name of a function: its tool}."""
    enforced: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{name of a function: the schema that its arguments must match}, for tools with a grammar."""

    def add(self, tool: dict[str, Any], namespace: str | None = None) -> None:
        """Add a tool that the client runs. Raises an `ApiError` for a tool of another type, or without a name."""
        kind = tool.get("type", "function")
        if kind in SHELLS:
            _check_shell(tool)
            function = SHELLS[kind]
        elif kind in ("function", "custom") and isinstance(tool.get("name"), str):
            function = _function(tool) if kind == "function" else _custom(tool)
        else:
            raise refused(
                "'tools' may contain functions and custom tools with a 'name', namespaces of such tools, and the types "
                "local_shell and shell",
                "tools",
            )
        own = function["name"]
        name = own if namespace is None else full_name(namespace, own)
        origin = ToolOrigin(kind, own if namespace is not None else None, namespace)
        if self.origins.setdefault(name, origin) != origin:
            raise refused(f"'tools' has two tools of the name {name[:80]!r}; rename one of them", "tools")
        self.functions.append({"type": "function", "function": {**function, "name": name}})
        if kind == "custom" and (pattern := _pattern(tool)) is not None:
            self.enforced[name] = _input_of({"pattern": f"^(?:{pattern})$", WHOLE_PATTERN: pattern})


def offered_tools(tools: Iterable[dict[str, Any]]) -> OfferedTools:
    """Return the tools of a request as functions. Tools that OpenAI's servers run are left out. Raises an `ApiError`
    for an invalid tool."""
    offered = OfferedTools()
    for tool in tools:
        if tool.get("type") in HOSTED_TOOLS:
            continue
        if tool.get("type") == "namespace":
            for inner in _within(tool):
                offered.add(inner, tool["name"])
        else:
            offered.add(tool)
    return offered


def choice_of(choice: Any) -> Any:
    """Return a `tool_choice` in which functions stand for the other types of tools."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in ("custom", *SHELLS):
        return {"type": "function", "name": choice.get("name") if kind == "custom" else kind}
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {**choice, "tools": [choice_of(tool) for tool in choice["tools"]]}
    return choice


def full_name(namespace: Any, name: Any) -> str:
    """Return the name by which the model gets a function of a namespace."""
    return f"{namespace}.{name}"


def arguments_of_input(text: Any) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def _within(tool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = tool.get("tools")
    if not isinstance(tool.get("name"), str) or not isinstance(inner, list):
        raise refused("a namespace in 'tools' must have a 'name' and a list of 'tools'", "tools", "invalid_type")
    for each in inner:
        if not isinstance(each, dict) or each.get("type") not in ("function", "custom"):
            raise refused(
                "'tools' of a namespace must be a list of functions and custom tools", "tools", "invalid_type"
            )
        yield each


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("parameters") or {}, dict):
        raise refused("the 'parameters' of a tool must be a JSON schema", "tools", "invalid_type")
    return {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}


def _custom(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the function for a custom tool. Its description contains the grammar, which the model must see to use the
    tool well."""
    description, form = tool.get("description") or "", tool.get("format") or {}
    if not isinstance(description, str) or not isinstance(form, dict):
        message = "the 'description' of a tool must be a string, and its 'format' an object"
        raise refused(message, "tools", "invalid_type")
    if form.get("type") == "grammar":
        what = "regular expression" if form.get("syntax") == "regex" else "Lark grammar"
        grammar = f"The input must match this {what}:\n{form.get('definition')}"
        description = f"{description}\n\n{grammar}" if description else grammar
    function = {"name": tool["name"], "description": description, "parameters": _input_of({})}
    return function if description else {name: function[name] for name in ("name", "parameters")}


def _input_of(more: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the function for a custom tool. `more`: further keywords of the input's schema."""
    properties = {_INPUT: {"type": "string", **more}}
    return {"type": "object", "properties": properties, "required": [_INPUT], "additionalProperties": False}


def _pattern(tool: dict[str, Any]) -> str | None:
    """Return a regular expression for the input of a custom tool; None for any text."""
    form = tool.get("format") or {"type": "text"}
    kind, syntax, definition = (form.get(name) for name in ("type", "syntax", "definition"))
    if kind == "text":
        return None
    if kind != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise refused(
            "the 'format' of a custom tool must have the type text, or the type grammar with a 'definition' and the "
            "'syntax' lark or regex",
            "tools",
        )
    return definition if syntax == "regex" else pattern_of_lark(definition, "tools")


def _check_shell(tool: dict[str, Any]) -> None:
    where = tool.get("environment")
    if where is not None and (not isinstance(where, dict) or where.get("type") != "local"):
        raise refused(
            "the 'environment' of a shell in 'tools' must be of the type local: this server runs no commands", "tools"
        )
