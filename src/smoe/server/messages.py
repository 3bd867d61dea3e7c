"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, as chat clients and agents use it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from smoe.conversation.conversation import NEW_ANSWER, Ending
from smoe.generation.request import EndReason
from smoe.server.answer import EndpointAnswer
from smoe.server.api_errors import ApiError, refused
from smoe.server.choice import ChoiceText, Delta, arguments_of
from smoe.server.events import Json, event
from smoe.server.image_parts import has_images
from smoe.server.message_fields import CountAsked, MessagesAsked
from smoe.server.prompts import text_of
from smoe.server.serving import Serving
from smoe.server.talk import Prepared, Talk, prepare, prompt_of, template_of, thinking
from smoe.server.texts import Texts

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""Anthropic's words for a choice's `finish_reason`."""
_BLOCKS: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "answer": {"type": "text", "text": ""},
}
"""{kind of output part: an empty content block for it}."""


async def messages(serving: Serving, request: Request) -> Response:
    """Continue a conversation: as one response, or as a stream of events."""

    def work(asked: MessagesAsked) -> tuple[Prepared, _MessagesForm]:
        prepared = prepare(serving, asked, _talk(asked), asked.settings)
        return prepared, _MessagesForm(asked.settings, bool(asked.stream), asked.model or serving.name, asked.stops)

    prepared, form = await serving.read(MessagesAsked, request, work)
    texts = serving.ask(prepared.wanted, form.settings, form.is_streamed or prepared.ends_early)
    return await _MessagesAnswer(form, prepared.choices(texts.requests)[0], texts).to(request, form.is_streamed)


async def count_tokens(serving: Serving, request: Request) -> Response:
    """Count the tokens of a conversation's prompt."""

    def work(asked: CountAsked) -> int:
        return len(prompt_of(serving, _talk(asked), "messages").ids)

    return Json({"input_tokens": await serving.read(CountAsked, request, work)})


class _MessagesForm(NamedTuple):
    """The values of a request to `/v1/messages`, apart from the prompt, from which its response is made."""

    settings: dict[str, str]
    is_streamed: bool
    model: str
    """The name that the client gave, or else that of the served model."""
    stops: tuple[str, ...]


def _talk(asked: CountAsked) -> Talk:
    turns = [turn for message in asked.messages for turn in _turns(message)]
    if asked.system:
        turns.insert(0, {"role": "system", "content": text_of(asked.system, "system")})
    choice = asked.tool_choice or {}
    output = asked.output_config or {}
    template = template_of(asked.chat_template_kwargs, output.get("effort"))
    if asked.thinking is not None:
        template = thinking(template, asked.thinking.get("type") != "disabled")
    return Talk(
        messages=turns,
        tools=[_tool(tool) for tool in asked.tools or ()],
        tool_choice=choice or None,
        is_single_call=choice.get("disable_parallel_tool_use") is True,
        schema=_schema(output.get("format") or asked.output_format),
        schema_field="output_config.format",
        template=template,
        ending=_ending(turns),
        max_new_tokens=asked.most_tokens,
        grammar=asked.grammar,
        thinking_tokens=_thinking_tokens(asked.thinking or {}),
    )


def _thinking_tokens(thinking: dict[str, Any]) -> int | None:
    """Return the maximum number of tokens of reasoning; None: no limit."""
    given = thinking.get("budget_tokens")
    if given is None or thinking.get("type") != "enabled":
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise refused("'thinking.budget_tokens' must be a whole number of at least 0", "thinking.budget_tokens")
    return given


def _ending(turns: list[dict[str, Any]]) -> Ending:
    """Return how the prompt ends. If the last message is the assistant's, the response continues this message."""
    last = turns[-1]
    is_prefilled = last["role"] == "assistant" and not last.get("tool_calls")
    return Ending(add_generation_prompt=False, continue_final_message=True) if is_prefilled else NEW_ANSWER


def _schema(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the JSON schema that the response must match; None for any text."""
    if form is None:
        return None
    schema = form.get("schema")
    if form.get("type") != "json_schema" or not isinstance(schema, dict):
        raise refused("'output_config.format' must be of the type json_schema, with a 'schema'", "output_config.format")
    return schema


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of Anthropic's API in the form of chat completions."""
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        message = (
            "'tools' may contain only tools with a 'name' and an 'input_schema'; this server has no built-in tools"
        )
        raise refused(message, "tools")
    schema = tool.get("input_schema") or {}
    if not isinstance(schema, dict):
        raise refused("the 'input_schema' of a tool must be a JSON schema", "tools")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def _turns(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of one turn of Anthropic's API in the form of chat completions. Results of tools become
    separate messages."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refused(f"'messages' has the role {str(role)[:40]!r}; it must be user, assistant or system", "messages")
    if not isinstance(content, str) and not (isinstance(content, list) and all(isinstance(b, dict) for b in content)):
        raise refused("the 'content' of a message must be text or a list of blocks", "messages")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role == "assistant":
        yield _assistant(blocks)
        return
    for block in blocks:
        if block.get("type") == "tool_result":
            result = text_of(block.get("content"), "messages")
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": result}
    others = [block for block in blocks if block.get("type") != "tool_result"]
    if others or not blocks:
        yield {"role": role, "content": others if has_images(others) else text_of(others, "messages")}


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message of the assistant in the form of chat completions: its text, reasoning and tool calls."""
    texts = [block for block in blocks if block.get("type") not in ("thinking", "redacted_thinking", "tool_use")]
    turn: dict[str, Any] = {"role": "assistant", "content": text_of(texts, "messages")}
    thoughts = [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]
    if any(thoughts):
        turn["reasoning_content"] = "".join(thoughts)
    calls = [
        {
            "id": str(block.get("id", "")),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": block.get("input") or {}},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    return turn | ({"tool_calls": calls} if calls else {})


class _MessagesAnswer(EndpointAnswer):
    done = b""

    def __init__(self, form: _MessagesForm, choice: ChoiceText, texts: Texts) -> None:
        super().__init__(texts, [choice], form.settings)
        self._form, self._choice, self._id = form, choice, "msg_" + secrets.token_hex(12)
        self._blocks: list[dict[str, Any]] = []
        """The content blocks so far. The `input` of a call is the text of its JSON."""
        self._is_open = False
        """Whether the last content block is incomplete."""

    def _keep(self, index: int, delta: Delta) -> None:
        self._added(index, delta)

    def _ended(self) -> dict[str, Any]:
        content = [
            {**block, "input": arguments_of(block["input"])} if block["type"] == "tool_use" else block
            for block in self._blocks
        ]
        return self._message(content) | self._stop | {"usage": self._usage}

    def _begun(self) -> bytes:
        stop = {"stop_reason": None, "stop_sequence": None}
        return self._event("message_start", message=self._message([]) | stop | {"usage": self._usage})

    def _added(self, index: int, delta: Delta) -> bytes:
        return b"".join(self._changes(delta))

    def _last(self) -> bytes:
        closed = self._close()
        return closed + self._event("message_delta", delta=self._stop, usage=self._usage) + self._event("message_stop")

    def _failed(self, problem: ApiError) -> bytes:
        return event(problem.for_anthropic, "error")

    def _changes(self, delta: Delta) -> Iterator[bytes]:
        for part in delta.parts:
            match part.kind:
                case "call":
                    yield self._open({"type": "tool_use", "id": part.id, "name": part.text, "input": ""})
                case "arguments":
                    self._blocks[-1]["input"] += part.text
                    yield self._delta("input_json_delta", "partial_json", part.text)
                case "reasoning" | "answer":
                    block = _BLOCKS[part.kind]
                    if not self._is_open or self._blocks[-1]["type"] != block["type"]:
                        yield self._open(dict(block))
                    self._blocks[-1][block["type"]] += part.text
                    yield self._delta(f"{block['type']}_delta", block["type"], part.text)

    def _open(self, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._blocks.append(block)
        self._is_open = True
        shown = block | ({"input": {}} if block["type"] == "tool_use" else {})
        return closed + self._event("content_block_start", index=len(self._blocks) - 1, content_block=shown)

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        delta = {"type": kind, key: text}
        return self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return self._event("content_block_stop", index=len(self._blocks) - 1)

    def _event(self, kind: str, **what: Any) -> bytes:
        return event({"type": kind, **what}, kind)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._form.model,
            "content": content,
        }

    @property
    def _stop(self) -> dict[str, Any]:
        """The fields of the reason why the text has ended. They include the stop string only if the request has just
        one, because it is unknown which of several has ended the text."""
        is_stopped = self._choice.reason is EndReason.STOP and self._choice.finish_reason == "stop" and self._form.stops
        reason = "stop_sequence" if is_stopped else _STOP_REASONS[self._choice.finish_reason or "stop"]
        stop = self._form.stops[0] if is_stopped and len(self._form.stops) == 1 else None
        return {"stop_reason": reason, "stop_sequence": stop}

    @property
    def _usage(self) -> dict[str, int]:
        """The numbers of tokens in Anthropic's form, in which prompt tokens from the KV cache are counted
        separately."""
        request = self._choice.request
        return {
            "input_tokens": len(request.ids) - request.reused_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": request.reused_tokens,
            "output_tokens": len(request.new_ids),
        }
