"""The endpoint `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from smoe.conversation.conversation import Ending
from smoe.server.answer import EndpointAnswer, Form, head_of
from smoe.server.api_errors import refused
from smoe.server.choice import ChoiceText, Delta, ToolCall, usage_of
from smoe.server.events import event
from smoe.server.fields import ChatAsked
from smoe.server.serving import Serving
from smoe.server.talk import Prepared, Talk, prepare, schema_of, template_of
from smoe.server.texts import Texts


async def chat_completions(serving: Serving, request: Request) -> Response:
    """Respond to a chat completion: continue a conversation in `n` texts, as one body or as a stream."""

    def work(asked: ChatAsked) -> tuple[Prepared, Form]:
        form = Form(asked.settings, bool(asked.stream), asked.wants_usage, asked.likeliest is not None)
        return prepare(serving, asked, talk_of(asked), asked.settings), form

    prepared, form = await serving.read(ChatAsked, request, work)
    texts = serving.ask(prepared.wanted, form.settings, form.is_streamed or prepared.ends_early)
    return await _ChatAnswer(serving, form, prepared, texts).to(request, form.is_streamed)


def talk_of(asked: ChatAsked, schema_field: str = "response_format") -> Talk:
    """Return the conversation of a request. `schema_field`: the request's field that contains the schema. Raises an
    `ApiError` for fields that exclude each other."""
    if asked.top_logprobs and asked.likeliest is None:
        raise refused("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    return Talk(
        messages=[message.model_dump(exclude_none=True) for message in asked.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in asked.tools or ()],
        tool_choice=asked.tool_choice,
        is_single_call=asked.parallel_tool_calls is False,
        schema=schema_of(asked.response_format),
        schema_field=schema_field,
        template=template_of(asked.chat_template_kwargs, asked.reasoning_effort),
        ending=_ending(asked),
        max_new_tokens=asked.most_tokens,
        grammar=asked.grammar,
        texts=asked.n or 1,
        logprobs=asked.likeliest,
    )


def _ending(asked: ChatAsked) -> Ending:
    """Return how the prompt ends: with the beginning of an answer, or within the last message.

    Raises an `ApiError` for a last message that cannot be continued.
    """
    if not asked.continue_final_message:
        return Ending(add_generation_prompt=asked.add_generation_prompt is not False)
    if asked.add_generation_prompt:
        message = "'add_generation_prompt' must be false or left out when 'continue_final_message' is true"
        raise refused(message, "add_generation_prompt")
    last = asked.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        message = "'continue_final_message' needs a last message of the role assistant without tool calls"
        raise refused(message, "continue_final_message")
    is_free = schema_of(asked.response_format) is None and asked.grammar is None
    if not is_free or asked.tool_choice not in (None, "auto", "none"):
        message = (
            "'continue_final_message' cannot be combined with a 'response_format', a 'grammar' or a 'tool_choice' that "
            "constrains the response from its first token"
        )
        raise refused(message, "continue_final_message")
    return Ending(add_generation_prompt=False, continue_final_message=True)


class _ChatAnswer(EndpointAnswer):
    def __init__(self, serving: Serving, form: Form, prepared: Prepared, texts: Texts) -> None:
        super().__init__(texts, prepared.choices(texts.requests), form.settings)
        self._form, self._tokens = form, serving.tokens
        self._head = head_of(serving, "chatcmpl-")

    def _ended(self) -> dict[str, Any]:
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_of(self._choices)}

    def _begun(self) -> bytes:
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._choices)))

    def _last(self) -> bytes:
        if not self._form.wants_usage:
            return b""
        return event({**self._chunk_head(), "choices": [], "usage": usage_of(self._choices)})

    def _added(self, index: int, delta: Delta) -> bytes:
        choice, chunk = self._choices[index], b""
        if not delta.is_empty:
            chunk = self._chunk(index, _added(choice, delta), self._logprobs(delta.chances))
        if choice.finish_reason is not None:
            chunk += self._chunk(index, {}, None, choice.finish_reason)
        return chunk

    def _chunk_head(self) -> dict[str, Any]:
        head = {**self._head, "object": "chat.completion.chunk"}
        return head | {"usage": None} if self._form.wants_usage else head

    def _chunk(self, index: int, delta: Any, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**self._chunk_head(), "choices": [choice]})

    def _choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thought:
            message["reasoning_content"] = choice.thought
        if choice.calls:
            message["content"] = choice.text if choice.text.strip() else None
            message["tool_calls"] = [_call(call) for call in choice.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.chances),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, chunk: list[Any]) -> dict[str, Any] | None:
        if not self._form.has_logprobs:
            return None
        return {"content": [each.in_words(self._tokens) for each in chunk], "refusal": None}


def _added(choice: ChoiceText, delta: Delta) -> dict[str, Any]:
    """Return a delta of a choice (text, reasoning and calls) in the form of a chat completion's stream. Only the first
    part of a tool call has the tool's name."""
    begun = sum(part.kind == "call" for part in delta.parts)
    number = len(choice.calls) - begun - 1
    added: dict[str, Any] = {}
    for part in delta.parts:
        match part.kind:
            case "reasoning":
                added["reasoning_content"] = added.get("reasoning_content", "") + part.text
            case "answer":
                added["content"] = added.get("content", "") + part.text
            case "call":
                number += 1
                call = {"index": number, **_call(ToolCall(part.id, part.text))}
                added.setdefault("tool_calls", []).append(call)
            case "arguments":
                calls = added.setdefault("tool_calls", [])
                if not calls:
                    calls.append({"index": number, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += part.text
    return added or {"content": ""}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
