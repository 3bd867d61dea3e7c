"""Converts requests for responses to the form of chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from smoe.server.api_errors import refused
from smoe.server.image_parts import has_images
from smoe.server.prompts import text_of
from smoe.server.response_calls import CALLS, called
from smoe.server.response_fields import ResponseAsked
from smoe.server.response_tools import OfferedTools, choice_of
from smoe.server.talk import Talk, template_of

StoredItem = Callable[[str], dict[str, Any]]
"""A function that returns the item with an id from the output of a stored response, or raises an `ApiError`."""
_ROLES = ("system", "developer", "user", "assistant")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output")
"""The types of items that are results of calls."""


def talk_of(
    asked: ResponseAsked, offered: OfferedTools, before: list[dict[str, Any]], stored_item: StoredItem
) -> tuple[Talk, list[dict[str, Any]]]:
    """Return the conversation from which the prompt is made, and the messages to store with the response. `offered`:
    the request's tools; `before`: the messages of the stored response that the request continues."""
    messages = before + messages_of(asked.input, stored_item)
    first = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    talk = Talk(
        messages=first + messages,
        tools=offered.functions,
        tool_choice=choice_of(asked.tool_choice),
        is_single_call=asked.parallel_tool_calls is False,
        schema=_schema(asked),
        schema_field="text.format",
        grammar=asked.grammar,
        template=template_of(asked.chat_template_kwargs, (asked.reasoning or {}).get("effort")),
        enforced=offered.enforced,
        max_new_tokens=asked.max_output_tokens,
    )
    return talk, messages


def messages_of(given: str | list[dict[str, Any]], stored_item: StoredItem) -> list[dict[str, Any]]:
    """Return the items of an `input` as messages. Raises an `ApiError` for an invalid item."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thought = ""
    for each in given:
        item = stored_item(str(each.get("id", ""))) if each.get("type") == "item_reference" else each
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_message(item))
        elif kind in CALLS:
            _add_call(messages, item)
        elif kind in OUTPUTS:
            messages.append(_result(item))
        elif kind == "reasoning":
            thought += _reasoning_of(item)
            continue
        else:
            raise refused(
                f"'input' has an item of the type {str(kind)[:40]!r}, which this server does not support", "input"
            )
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + thought
        thought = ""
    if not messages:
        raise refused("'input' is empty; give some text", "input")
    return messages


def _message(item: dict[str, Any]) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise refused(f"'input' has a message whose role is not one of {', '.join(_ROLES)}", "input")
    if isinstance(content, str) or has_images(_parts(content)):
        return {"role": role, "content": content}
    return {"role": role, "content": text_of(_parts(content), "input")}


def _reasoning_of(item: dict[str, Any]) -> str:
    """Return the text of a reasoning item, which belongs to the assistant's message after it. Summaries and encrypted
    reasoning come from other servers."""
    parts = item.get("content")
    if not isinstance(parts, list):
        return ""
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise refused("the content of an item of 'input' must be text or a list of parts", "input", "invalid_type")
    return content


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add a tool call to the last message if that message is the assistant's. Otherwise add the call as a message of
    its own."""
    name, arguments = called(item)
    call = {"id": _call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _result(item: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a tool call as a message."""
    output = item.get("output")
    if item["type"] == "shell_call_output":
        content = json.dumps(_parts(output), ensure_ascii=False)
    else:
        content = output if isinstance(output, str) else text_of(_parts(output), "input")
    return {"role": "tool", "tool_call_id": _call_id(item), "content": content}


def _call_id(item: dict[str, Any]) -> str:
    """Return the id of a call, in the call itself or in its result. The result of a local shell has it as `id`."""
    return str(item.get("call_id") or item.get("id") or "")


def _schema(asked: ResponseAsked) -> dict[str, Any] | None:
    form = (asked.text.format if asked.text is not None else None) or {"type": "text"}
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(form.get("schema"), dict):
        schema: dict[str, Any] = form["schema"]
        return schema
    raise refused("'text.format' must be text, json_object, or json_schema with a 'schema'", "text.format")
