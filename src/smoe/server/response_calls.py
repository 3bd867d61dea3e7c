"""The items of responses that are calls of tools. The model writes each as the call of a function, which stands for the
tool (`response_tools.py`)."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, ClassVar

from smoe.server.output.output_reader import Part
from smoe.server.response_tools import SHELLS, ToolOrigin, arguments_of_input, full_name

CallEvent = tuple[str, dict[str, Any]]
"""(type of an event, its fields)."""
_INPUT_BEGINS = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTER = re.compile(
    r'[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
)
"""Characters inside a JSON string, or one escape, if they are complete."""
_MAY_BECOME_ESCAPE = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?"
)
"""The beginning of an escape."""


class CallItem:
    """An item of a response's output for one call, while the model writes the call."""

    prefix: ClassVar = "fc_"
    """The beginning of the item's id."""

    def __init__(self, call: Part, origin: ToolOrigin) -> None:
        self.item: dict[str, Any] = {"id": self.prefix + secrets.token_hex(12), **self._begun(call, origin)}
        self.arguments = ""

    def write(self, text: str) -> Iterator[CallEvent]:
        """Add text to the call's arguments. Yield the events for it."""
        self.arguments += text
        self.item["arguments"] = self.arguments
        yield "function_call_arguments.delta", {"delta": text}

    def end(self, *, is_cut_off: bool) -> Iterator[CallEvent]:
        """End the call. Yield its last events, before the event that contains the item."""
        self.item["status"] = "incomplete" if is_cut_off else "completed"
        yield "function_call_arguments.done", {"name": self.item["name"], "arguments": self.arguments}

    def _begun(self, call: Part, origin: ToolOrigin) -> dict[str, Any]:
        return {"type": "function_call", **_named(call, origin), "arguments": "", "status": "in_progress"}


class _CustomCall(CallItem):
    """A call of a custom tool. Its input, a text, is decoded while the model writes it."""

    prefix = "ctc_"

    def __init__(self, call: Part, origin: ToolOrigin) -> None:
        super().__init__(call, origin)
        self._place = 0
        """The index in the arguments up to which the input is decoded; 0: its beginning has not been found."""

    def write(self, text: str) -> Iterator[CallEvent]:
        self.arguments += text
        found = _INPUT_BEGINS.match(self.arguments) if not self._place else None
        if found is not None:
            self._place = found.end()
        if self._place:
            text, self._place = _decoded(self.arguments, self._place)
            yield from self._add(text)

    def end(self, *, is_cut_off: bool) -> Iterator[CallEvent]:
        given = _object(self.arguments).get("input")
        if not self._place:  # the model wrote other arguments
            yield from self._add(given if isinstance(given, str) else self.arguments)
        self.item["status"] = "incomplete" if is_cut_off else "completed"
        yield "custom_tool_call_input.done", {"input": self.item["input"]}

    def _begun(self, call: Part, origin: ToolOrigin) -> dict[str, Any]:
        return {"type": "custom_tool_call", **_named(call, origin), "input": "", "status": "in_progress"}

    def _add(self, text: str) -> Iterator[CallEvent]:
        if text:
            self.item["input"] += text
            yield "custom_tool_call_input.delta", {"delta": text}


class _WholeCall(CallItem):
    """A call whose arguments are read when they are complete."""

    def write(self, text: str) -> Iterator[CallEvent]:
        self.arguments += text
        yield from ()


class _LocalShellCall(_WholeCall):
    """A call of the local shell: one command, as a list of strings."""

    def end(self, *, is_cut_off: bool) -> Iterator[CallEvent]:
        given = _object(self.arguments)
        command = given.get("command")
        if isinstance(command, str):  # the model forgot that it must be a list
            command = ["bash", "-lc", command]
        env = given.get("env")
        self.item["action"] |= {"command": _strings(command), "env": env if isinstance(env, dict) else {}}
        wanted = (("working_directory", str), ("timeout_ms", int))
        self.item["action"] |= {name: given[name] for name, kind in wanted if isinstance(given.get(name), kind)}
        self.item["status"] = "completed" if self.item["action"]["command"] and not is_cut_off else "incomplete"
        yield from ()

    def _begun(self, call: Part, origin: ToolOrigin) -> dict[str, Any]:
        action: dict[str, Any] = {"type": "exec", "command": [], "env": {}}
        # clients name the call by either id
        return {
            "id": call.id,
            "type": "local_shell_call",
            "call_id": call.id,
            "action": action,
            "status": "in_progress",
        }


class _ShellCall(_WholeCall):
    """A call of the shell: commands, each a line."""

    prefix = "sh_"

    def end(self, *, is_cut_off: bool) -> Iterator[CallEvent]:
        given = _object(self.arguments)
        commands = given.get("commands")
        self.item["action"]["commands"] = _strings([commands] if isinstance(commands, str) else commands)
        limits = ("timeout_ms", "max_output_length")
        self.item["action"] |= {name: given[name] for name in limits if isinstance(given.get(name), int)}
        self.item["status"] = "completed" if self.item["action"]["commands"] and not is_cut_off else "incomplete"
        for index, command in enumerate(self.item["action"]["commands"]):
            yield "shell_call_command.added", {"command_index": index, "command": ""}
            yield "shell_call_command.delta", {"command_index": index, "delta": command}
            yield "shell_call_command.done", {"command_index": index, "command": command}

    def _begun(self, call: Part, origin: ToolOrigin) -> dict[str, Any]:
        action: dict[str, Any] = {"commands": [], "timeout_ms": None, "max_output_length": None}
        where = {"type": "local"}
        return {
            "type": "shell_call",
            "call_id": call.id,
            "action": action,
            "environment": where,
            "status": "in_progress",
        }


_ITEMS = {"custom": _CustomCall, "local_shell": _LocalShellCall, "shell": _ShellCall}
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "shell_call")
"""The types of items that are calls."""


def call_item(call: Part, origin: ToolOrigin) -> CallItem:
    """Return the item for a call that begins."""
    return _ITEMS.get(origin.kind, CallItem)(call, origin)


def called(item: dict[str, Any]) -> tuple[Any, Any]:
    """Return the name and the arguments, as JSON text, of the function call that stands for an item of an `input`."""
    kind, action = item["type"], item.get("action")
    if kind in ("local_shell_call", "shell_call"):
        function, given = SHELLS[kind.removesuffix("_call")], action if isinstance(action, dict) else {}
        known = {name: given.get(name) for name in function["parameters"]["properties"]}
        wanted = {name: value for name, value in known.items() if value not in (None, {})}
        return function["name"], json.dumps(wanted, ensure_ascii=False)
    name = full_name(item["namespace"], item.get("name")) if item.get("namespace") else item.get("name")
    if kind == "custom_tool_call":
        return name, arguments_of_input(item.get("input", ""))
    return name, item.get("arguments", "{}")


def _decoded(json_text: str, begin: int) -> tuple[str, int]:
    """Return the text that the inside of a JSON string means, from the index `begin` to its end or its last complete
    character, and the index after it. A backslash that begins no escape means itself, as models forget to double it."""
    pieces, place = list[str](), begin
    while place < len(json_text) and json_text[place] != '"':
        whole = _CHARACTER.match(json_text, place)
        if whole is not None:
            pieces.append(json.loads(f'"{whole[0]}"', strict=False))
            place = whole.end()
        elif _MAY_BECOME_ESCAPE.fullmatch(json_text, place):
            break
        else:
            pieces.append("\\")
            place += 1
    return "".join(pieces), place


def _named(call: Part, origin: ToolOrigin) -> dict[str, Any]:
    named = {"call_id": call.id, "name": origin.name or call.text}
    return named | ({"namespace": origin.namespace} if origin.namespace is not None else {})


def _object(text: str) -> dict[str, Any]:
    """Return a JSON object; an empty one if the text is another value, or was cut off."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _strings(value: Any) -> list[str]:
    """Return a list of strings; an empty one for any other value."""
    return value if isinstance(value, list) and all(isinstance(each, str) for each in value) else []
