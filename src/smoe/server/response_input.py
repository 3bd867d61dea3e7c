"""Converts requests for responses to the form of chat completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from smoe.server.image_parts import has_images
from smoe.server.problem import refused
from smoe.server.prompts import text_of
from smoe.server.response_fields import HOSTED_TOOLS, ResponseAsked
from smoe.server.talk import Talk, template_of

StoredItem = Callable[[str], dict[str, Any]]
"""A function that returns the item with an id from the output of a stored response, or raises an `ApiError`."""
_ROLES = ("system", "developer", "user", "assistant")


def talk_of(
    asked: ResponseAsked, before: list[dict[str, Any]], stored_item: StoredItem
) -> tuple[Talk, list[dict[str, Any]]]:
    """Return the conversation from which the prompt is made, and the messages to store with the response. `before`: the
    messages of the stored response that the request continues."""
    messages = before + messages_of(asked.input, stored_item)
    first = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    talk = Talk(
        messages=first + messages,
        tools=[function for tool in asked.tools or () for function in _functions(tool)],
        tool_choice=asked.tool_choice,
        is_single_call=asked.parallel_tool_calls is False,
        schema=_schema(asked),
        schema_field="text.format",
        grammar=asked.grammar,
        template=template_of(asked.chat_template_kwargs, (asked.reasoning or {}).get("effort")),
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
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str) else text_of(_parts(output), "input")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content})
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
    name = _full_name(item["namespace"], item.get("name")) if item.get("namespace") else item.get("name")
    function = {"name": name, "arguments": item.get("arguments", "{}")}
    call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def names_within(tool: dict[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the functions of a namespace: the name that the model gets, and the names of namespace and function. A tool
    of another type has none."""
    if tool.get("type") == "namespace":
        for function in _functions(tool):
            name = function["function"]["name"]
            yield name, (tool["name"], name.removeprefix(_full_name(tool["name"], "")))


def _functions(tool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the functions of one item of `tools`, in the form of chat completions: none for a tool of OpenAI's servers,
    and those within a namespace with their full names."""
    kind, inner = tool.get("type"), tool.get("tools")
    if kind in HOSTED_TOOLS:
        return
    if kind != "namespace":
        yield _function(tool)
        return
    if not isinstance(tool.get("name"), str) or not isinstance(inner, list):
        raise refused("a namespace in 'tools' must have a 'name' and a list of 'tools'", "tools", "invalid_type")
    for each in inner:
        if not isinstance(each, dict):
            raise refused("'tools' of a namespace must be a list of functions", "tools", "invalid_type")
        function = _function(each)["function"]
        yield {"type": "function", "function": {**function, "name": _full_name(tool["name"], function["name"])}}


def _full_name(namespace: Any, name: Any) -> str:
    return f"{namespace}.{name}"


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise refused("'tools' may contain only functions with a 'name', and namespaces of such functions", "tools")
    if not isinstance(tool.get("parameters") or {}, dict):
        raise refused("the 'parameters' of a tool must be a JSON schema", "tools", "invalid_type")
    wanted: Iterable[str] = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in wanted if tool.get(name) is not None}}


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
