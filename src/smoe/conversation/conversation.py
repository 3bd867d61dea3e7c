"""Conversations as chat templates expect them, and equivalent forms for templates that fail on the usual form.

If a template fails on a conversation, it is tried with other forms of the same meaning:

| form | for templates that |
| --- | --- |
| `developer_as_system` | do not know the role `developer` |
| `system_in_user` | refuse a system message: its text is put before the first user message |
| `tools_in_full` | need a tool's optional `description` or `parameters`, or iterate over missing tools |
| `short_ids` | refuse ids of calls other than nine letters and digits |
| `arguments_as_text` | read the arguments of calls as JSON text rather than as values |
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

_ALPHABET = string.digits + string.ascii_letters
_ID_CHARACTERS = 9
_NO_PARAMETERS = {"type": "object", "properties": {}}


class Ending(NamedTuple):
    """How a rendered conversation ends. The names are those of chat templates."""

    add_generation_prompt: bool = True
    """Whether the text ends with the beginning of an answer."""
    continue_final_message: bool = False
    """Whether the text ends within the last message."""


NEW_ANSWER = Ending()


@dataclass(frozen=True)
class Conversation:
    """The messages and tools of a conversation, as texts, numbers, lists and dictionaries."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """The tools, in the form of OpenAI's chat completions."""

    def with_messages(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Conversation:
        """Return a copy with `change` applied to every message."""
        return replace(self, messages=[change(message) for message in self.messages])


def developer_as_system(conversation: Conversation) -> Conversation:
    """Return the conversation with the role `system` for messages of the role `developer`."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "role": "system"} if message["role"] == "developer" else message

    return conversation.with_messages(changed)


def system_in_user(conversation: Conversation) -> Conversation:
    """Return the conversation with the texts of system messages before the text of the first user message."""
    system = [message["content"] for message in conversation.messages if message["role"] == "system"]
    others = [message for message in conversation.messages if message["role"] != "system"]
    for place, message in enumerate(others):
        if system and message["role"] == "user":
            content = message["content"]
            if isinstance(content, str):
                content = "\n\n".join([*system, content])
            else:
                content = [{"type": "text", "text": "".join(f"{text}\n\n" for text in system)}, *content]
            others[place] = {**message, "content": content}
            return replace(conversation, messages=others)
    return conversation


def tools_in_full(conversation: Conversation) -> Conversation:
    """Return the conversation with all optional fields of tools and their parameters: descriptions, types,
    properties."""
    return replace(conversation, tools=[_in_full(tool) for tool in conversation.tools or ()])


def _in_full(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = {**_NO_PARAMETERS, **(function.get("parameters") or {}), "type": "object"}
    if isinstance(parameters["properties"], dict):
        parameters["properties"] = {
            name: {"type": "string", "description": "", **value} if isinstance(value, dict) else value
            for name, value in parameters["properties"].items()
        }
    parameters.setdefault("required", [])
    description = function.get("description") or ""
    return {**tool, "function": {**function, "description": description, "parameters": parameters}}


def short_ids(conversation: Conversation) -> Conversation:
    """Return the conversation with ids of tool calls that consist of nine letters and digits. Equal ids stay equal."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = _short(message["tool_call_id"])
        if "tool_calls" in message:
            message["tool_calls"] = [{**call, "id": _short(str(call.get("id")))} for call in message["tool_calls"]]
        return message

    return conversation.with_messages(changed)


def _short(id: str) -> str:
    if len(id) == _ID_CHARACTERS and id.isascii() and id.isalnum():
        return id
    number, letters = int.from_bytes(hashlib.sha256(id.encode("utf8", "surrogatepass")).digest(), "big"), ""
    for _ in range(_ID_CHARACTERS):
        number, letter = divmod(number, len(_ALPHABET))
        letters += _ALPHABET[letter]
    return letters


def arguments_as_text(conversation: Conversation) -> Conversation:
    """Return the conversation with the arguments of tool calls as JSON text."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        if "tool_calls" not in message:
            return message
        return {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}

    return conversation.with_messages(changed)


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def text_in_reasoning(conversation: Conversation) -> Conversation:
    """Return the conversation with the text of a message that has reasoning and calls at the end of its reasoning."""

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        thought, text = message.get("reasoning_content"), message.get("content")
        if not (thought and text and message.get("tool_calls")):
            return message
        return {**message, "content": "", "reasoning_content": f"{thought}\n\n{text}"}

    return conversation.with_messages(changed)


OTHER_FORMS = (developer_as_system, system_in_user, tools_in_full, short_ids, text_in_reasoning, arguments_as_text)
"""The functions that return a conversation in another form, in the order in which they are tried."""
