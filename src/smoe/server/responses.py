"""The endpoint `/v1/responses`, as far as chat programs use it: text and tools, as one body or as a stream; later
requests can continue a response by its id."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from smoe.server.answer import EndpointAnswer
from smoe.server.api_errors import ApiError
from smoe.server.choice import ChoiceText, Delta
from smoe.server.events import event, to_json
from smoe.server.output.output_reader import Part
from smoe.server.response_calls import CallEvent, CallItem, call_item
from smoe.server.response_fields import ResponseAsked
from smoe.server.response_input import talk_of
from smoe.server.response_store import ResponseStore
from smoe.server.response_tools import OfferedTools, ToolOrigin, offered_tools
from smoe.server.serving import Serving
from smoe.server.talk import Prepared, prepare
from smoe.server.texts import Texts

_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("output_text", {"logprobs": []}),
    "reasoning": ("reasoning_text", {}),
}
"""{kind of text item: (type of its only content part, the other fields of that part)}."""


class Responses:
    """Makes, stores and returns the responses of one server."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._store = ResponseStore()

    def get(self, name: str) -> bytes:
        """Return a stored response as JSON."""
        return self._store.get(name)

    def delete(self, name: str) -> dict[str, Any]:
        """Delete a stored response."""
        self._store.delete(name)
        return {"id": name, "object": "response", "deleted": True}

    async def make(self, request: Request) -> Response:
        """Generate a response."""
        serving = self._serving

        def work(asked: ResponseAsked) -> tuple[Prepared, _Form]:
            before: list[dict[str, Any]] = []
            if asked.previous_response_id is not None:
                before = self._store.messages(asked.previous_response_id, "previous_response_id")
            offered = offered_tools(asked.tools or ())
            talk, messages = talk_of(asked, offered, before, partial(self._store.item, param="input"))
            prepared = prepare(serving, asked, talk, asked.settings)
            return prepared, _form_of(asked, offered, serving.name, messages)

        prepared, form = await serving.read(ResponseAsked, request, work)
        texts = serving.ask(prepared.wanted, form.settings, form.is_streamed or prepared.ends_early)
        answer = _ResponsesAnswer(self._store, form, prepared.choices(texts.requests)[0], texts)
        return await answer.to(request, form.is_streamed)


class _Form(NamedTuple):
    """The values of a request to `/v1/responses` from which its response is made. They are stored as JSON, because
    parsed objects take ten times the memory."""

    settings: dict[str, str]
    is_streamed: bool
    is_stored: bool
    empty: bytes
    """The response before any output."""
    messages: bytes
    """The messages of the conversation."""
    tools: dict[str, ToolOrigin]
    """{name of a function that the model gets: the tool that it stands for}."""


def _form_of(asked: ResponseAsked, offered: OfferedTools, model: str, messages: list[dict[str, Any]]) -> _Form:
    is_stored = asked.store is not False
    empty, stored = to_json(_empty(asked, model)), to_json(messages if is_stored else [])
    return _Form(asked.settings, bool(asked.stream), is_stored, empty, stored, offered.origins)


class _ResponsesAnswer(EndpointAnswer):
    done = b""

    def __init__(self, stored: ResponseStore, form: _Form, choice: ChoiceText, texts: Texts) -> None:
        super().__init__(texts, [choice], form.settings)
        self._store, self._form, self._choice = stored, form, choice
        self._output: list[dict[str, Any]] = []
        self._call: CallItem | None = None
        """The call that the model writes, which is the last item of the output."""
        self._events = 0

    def _response(self) -> dict[str, Any]:
        """Return the response before any output, as an object."""
        empty: dict[str, Any] = json.loads(self._form.empty)
        return empty

    def _keep(self, index: int, delta: Delta) -> None:
        self._added(index, delta)

    def _ended(self) -> dict[str, Any]:
        self._close()
        return self._finished()

    def _begun(self) -> bytes:
        response = self._response()
        return b"".join(self._event(f"response.{state}", response=response) for state in ("created", "in_progress"))

    def _added(self, index: int, delta: Delta) -> bytes:
        """Return the events for `delta`. Text extends the current message; each tool call becomes an item of its
        own."""
        return b"".join(self._items(delta))

    def _last(self) -> bytes:
        closed = self._close()
        response = self._finished()
        return closed + self._event(f"response.{response['status']}", response=response)

    def _failed(self, problem: ApiError) -> bytes:
        code = problem.code if problem.status < 500 else "server_error"
        error = {"code": code, "message": problem.message}
        return self._event("response.failed", response=self._response() | {"status": "failed", "error": error})

    def _items(self, delta: Delta) -> Iterator[bytes]:
        for part in delta.parts:
            match part.kind:
                case "reasoning":
                    yield from self._write("reasoning", part.text)
                case "answer":
                    yield from self._write("message", part.text)
                case "call":
                    yield self._close()
                    yield from self._open_call(part)
                case "arguments":
                    assert self._call is not None, "arguments follow a call"
                    yield from self._call_events(self._call.write(part.text))

    def _close(self) -> bytes:
        if not self._output or self._output[-1].get("status") != "in_progress":
            return b""
        return b"".join(self._close_text() if self._call is None else self._close_call(self._call))

    @property
    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    @property
    def _is_cut_off(self) -> bool:
        return self._choice.finish_reason == "length"

    @property
    def _part_place(self) -> dict[str, Any]:
        return {**self._item_place, "content_index": 0}

    def _write(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._output or self._output[-1]["type"] != kind:
            yield self._close()
            yield from self._open(kind)
        self._output[-1]["content"][0]["text"] += text
        name, more = _PARTS[kind]
        yield self._event(f"response.{name}.delta", **self._part_place, delta=text, **more)

    def _open(self, kind: str) -> Iterator[bytes]:
        name, more = _PARTS[kind]
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        part: dict[str, Any]
        if kind == "message":
            item, part = {"id": "msg_" + secrets.token_hex(12), **item, "role": "assistant"}, {"annotations": []}
        else:
            item, part = {"id": "rs_" + secrets.token_hex(12), **item, "summary": []}, {}
        self._output.append(item | {"content": []})
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1])
        self._output[-1]["content"].append({"type": name, "text": "", **part, **more})
        yield self._event("response.content_part.added", **self._part_place, part=self._output[-1]["content"][0])

    def _close_text(self) -> Iterator[bytes]:
        item = self._output[-1]
        part, (name, more) = item["content"][0], _PARTS[item["type"]]
        item["status"] = "incomplete" if self._is_cut_off else "completed"
        yield self._event(f"response.{name}.done", **self._part_place, text=part["text"], **more)
        yield self._event("response.content_part.done", **self._part_place, part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _open_call(self, call: Part) -> Iterator[bytes]:
        self._call = call_item(call, self._form.tools.get(call.text, ToolOrigin()))
        self._output.append(self._call.item)
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1])

    def _close_call(self, call: CallItem) -> Iterator[bytes]:
        yield from self._call_events(call.end(is_cut_off=self._is_cut_off))
        self._call = None
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=call.item)

    def _call_events(self, events: Iterator[CallEvent]) -> Iterator[bytes]:
        for name, what in events:
            yield self._event(f"response.{name}", **self._item_place, **what)

    def _event(self, type: str, **what: Any) -> bytes:
        self._events += 1
        return event({"type": type, **what, "sequence_number": self._events - 1}, type)

    def _finished(self) -> dict[str, Any]:
        """Return the finished response, and store it unless `store` is false."""
        request, is_cut = self._choice.request, self._is_cut_off
        prompt, new = len(request.ids), len(request.new_ids)
        response = self._response() | {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": request.reused_tokens, "cache_write_tokens": 0},
                "output_tokens": new,
                "output_tokens_details": {"reasoning_tokens": self._choice.thought_tokens},
                "total_tokens": prompt + new,
            },
        }
        if self._form.is_stored:
            self._store.put(response, [*json.loads(self._form.messages), self._message_of_answer()])
        return response

    def _message_of_answer(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._choice.text}
        if self._choice.thought:
            message["reasoning_content"] = self._choice.thought
        if self._choice.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self._choice.calls
            ]
        return message


def _empty(asked: ResponseAsked, model: str) -> dict[str, Any]:
    """Return the response before any output, made from the request."""
    return {
        "id": "resp_" + secrets.token_hex(16),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": asked.reasoning or {"effort": None, "summary": None},
        "store": asked.store is not False,
        "temperature": asked.temperature,
        "text": {"format": (asked.text.format if asked.text is not None else None) or {"type": "text"}},
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": asked.tools or [],
        "top_p": asked.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
    }
