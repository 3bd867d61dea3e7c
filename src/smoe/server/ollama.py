"""`POST /api/chat` and `/api/generate`: Ollama's API. Requests become those of chat completions, or of completions
where no chat template applies; responses have Ollama's form, and streams are lines of JSON."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from smoe.server.answer import EndpointAnswer
from smoe.server.api_errors import ApiError, refused
from smoe.server.body import fields_of
from smoe.server.chat import talk_of
from smoe.server.choice import ChoiceText, Delta, ToolCall, arguments_of
from smoe.server.completion import texts_wanted
from smoe.server.events import Json, to_json
from smoe.server.fields import ChatAsked, CompletionAsked
from smoe.server.image_parts import with_images
from smoe.server.ollama_fields import OllamaChatAsked, OllamaGenerateAsked, OllamaGenerating
from smoe.server.serving import Serving
from smoe.server.talk import Prepared, prepare, thinking
from smoe.server.texts import Texts

_NANOSECONDS = 10**9


async def ollama_chat(serving: Serving, request: Request) -> Response:
    """Respond to `/api/chat`: continue a conversation. The response is one JSON body or a stream of lines."""

    def work(asked: OllamaChatAsked) -> _Asked | None:
        if not asked.messages:
            return None
        body = {"messages": _messages(asked.messages), "tools": asked.tools, **_common(serving, asked)}
        return _Asked(_of_chat(serving, body), _form(serving, asked, _as_message))

    return await _answered(serving, request, await serving.read(OllamaChatAsked, request, work), _as_message)


async def ollama_generate(serving: Serving, request: Request) -> Response:
    """Respond to `/api/generate`: answer a prompt as the message of a user, or with `raw` continue it as text. The
    response is one JSON body or a stream of lines."""

    def work(asked: OllamaGenerateAsked) -> _Asked | None:
        if not asked.prompt:
            return None
        if asked.raw and asked.system:
            raise refused(
                "'system' needs the chat template, which 'raw' leaves out; leave out one of the two", "system"
            )
        if asked.raw and asked.images:
            raise refused("'images' need the chat template, which 'raw' leaves out; leave out one of the two", "images")
        if asked.raw or not (serving.prompts.has_template or asked.system):
            return _Asked(_of_text(serving, asked, asked.prompt), _form(serving, asked, _as_response))
        first = [{"role": "system", "content": asked.system}] if asked.system else []
        body = {
            "messages": [*first, {"role": "user", "content": with_images(asked.prompt, asked.images)}],
            **_common(serving, asked),
        }
        return _Asked(_of_chat(serving, body), _form(serving, asked, _as_response))

    return await _answered(serving, request, await serving.read(OllamaGenerateAsked, request, work), _as_response)


_Shown = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
"""A function that returns text, reasoning and calls in the form of an endpoint."""


@dataclass(frozen=True)
class _OllamaForm:
    """The values of a request to Ollama's API, apart from the prompt, from which its response is made."""

    settings: Mapping[str, str]
    model: str
    """The name that the client gave, or else that of the served model."""
    is_streamed: bool
    has_logprobs: bool
    shown: _Shown


@dataclass(frozen=True)
class _Asked:
    prepared: Prepared
    form: _OllamaForm


async def _answered(serving: Serving, request: Request, asked: _Asked | None, shown: _Shown) -> Response:
    """Return the response to a request. If the request has no prompt, the response says that the model is loaded."""
    if asked is None:
        loaded = {"done": True, "done_reason": "load"}
        return Json({"model": serving.name, "created_at": timestamp(), **shown("", "", []), **loaded})
    prepared, form = asked.prepared, asked.form
    texts = serving.ask(prepared.wanted, form.settings, form.is_streamed or prepared.ends_early)
    return await _OllamaAnswer(serving, form, prepared.choices(texts.requests)[0], texts).to(request, form.is_streamed)


def timestamp() -> str:
    """Return the time in Ollama's form."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def _form(serving: Serving, asked: OllamaGenerating, shown: _Shown) -> _OllamaForm:
    return _OllamaForm(
        asked.settings, asked.model or serving.name, asked.stream is not False, bool(asked.logprobs), shown
    )


def _common(serving: Serving, asked: OllamaGenerating) -> dict[str, Any]:
    """Return the fields that chat and generate requests share, as fields of chat completions."""
    template: dict[str, Any] = {}
    if asked.think is not None:
        template = thinking({}, bool(asked.think))
    return {
        "model": serving.name,
        **({} if asked.options is None else asked.options.sampling()),
        "response_format": _response_format(asked.format),
        "logprobs": asked.logprobs,
        "top_logprobs": asked.top_logprobs if asked.logprobs else None,
        "reasoning_effort": asked.think if isinstance(asked.think, str) else None,
        "chat_template_kwargs": template,
    }


def _response_format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if isinstance(given, dict):
        return {"type": "json_schema", "schema": given}
    return {"type": "json_object"} if given else None


def _of_chat(serving: Serving, body: dict[str, Any]) -> Prepared:
    asked = fields_of(ChatAsked, body)
    asked.check_unsupported()
    return prepare(serving, asked, talk_of(asked, "format"), asked.settings)


def _of_text(serving: Serving, asked: OllamaGenerateAsked, prompt: str) -> Prepared:
    """Return the text to generate as a continuation of `prompt`, to which no chat template is applied."""
    sampling = {} if asked.options is None else asked.options.sampling()
    body = {
        "model": serving.name,
        "prompt": prompt,
        "num_predict": -1,
        **sampling,
        "response_format": _response_format(asked.format),
        "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
    }
    text = fields_of(CompletionAsked, body)
    text.check_unsupported()
    return Prepared.plain(texts_wanted(serving, text, "format"), serving.ends)


def _messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in the form of chat completions. Ollama's tool calls have no ids, so results are assigned
    to the calls in their order."""
    messages: list[dict[str, Any]] = []
    calls = deque[str]()
    for message in given:
        turn = {name: message[name] for name in ("role", "content", "tool_call_id") if message.get(name) is not None}
        turn.setdefault("content", "")
        turn["content"] = with_images(turn["content"], message.get("images"))
        if message.get("thinking"):
            turn["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            turn["tool_calls"] = [
                {"id": f"call_{len(messages)}_{number}", "type": "function", **call}
                for number, call in enumerate(message["tool_calls"])
            ]
            calls.extend(str(call["id"]) for call in turn["tool_calls"])
        if message.get("role") == "tool":
            turn.setdefault("tool_call_id", calls.popleft() if calls else "")
            if message.get("tool_name"):
                turn["name"] = message["tool_name"]
        messages.append(turn)
    return messages


def _as_message(text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {"message": message | ({"thinking": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})}


def _as_response(text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text} | ({"thinking": thought} if thought else {})


class _OllamaAnswer(EndpointAnswer):
    done = still_here = b""
    media_type = "application/x-ndjson"

    def __init__(self, serving: Serving, form: _OllamaForm, choice: ChoiceText, texts: Texts) -> None:
        super().__init__(texts, [choice], form.settings)
        self._form, self._choice, self._tokens = form, choice, serving.tokens
        self._sent_calls = 0

    def _ended(self) -> dict[str, Any]:
        choice = self._choice
        shown = self._form.shown(choice.text, choice.thought, [_call(call) for call in choice.calls])
        return self._head() | shown | self._logprobs(choice.chances) | self._end()

    def _added(self, index: int, delta: Delta) -> bytes:
        """Return a line of the stream for new text, reasoning and complete tool calls. A call is complete when a later
        call begins or the text ends."""
        text, thought = (
            "".join(part.text for part in delta.parts if part.kind == kind) for kind in ("answer", "reasoning")
        )
        calls = self._choice.calls[self._sent_calls : len(self._choice.calls) - (self._choice.reason is None)]
        if not (text or thought or calls):
            return b""
        self._sent_calls += len(calls)
        shown = self._form.shown(text, thought, [_call(call) for call in calls])
        return _line(self._head() | shown | self._logprobs(delta.chances) | {"done": False})

    def _last(self) -> bytes:
        return _line(self._head() | self._form.shown("", "", []) | self._end())

    def _failed(self, problem: ApiError) -> bytes:
        return _line(problem.for_ollama)

    def _head(self) -> dict[str, Any]:
        return {"model": self._form.model, "created_at": timestamp()}

    def _logprobs(self, chances: list[Any]) -> dict[str, Any]:
        return {"logprobs": [each.in_words(self._tokens) for each in chances]} if self._form.has_logprobs else {}

    def _end(self) -> dict[str, Any]:
        """Return the fields of the last line: the reason why the text has ended, and the work in tokens and
        nanoseconds."""
        request = self._choice.request
        return {
            "done": True,
            "done_reason": "length" if self._choice.finish_reason == "length" else "stop",
            "total_duration": round((request.ended - request.asked) * _NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": len(request.ids),
            "prompt_eval_duration": round((request.first - request.begun) * _NANOSECONDS),
            "eval_count": len(request.new_ids),
            "eval_duration": round((request.ended - request.first) * _NANOSECONDS),
        }


def _line(value: dict[str, Any]) -> bytes:
    return to_json(value) + b"\n"


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments_of(call.arguments)}}
