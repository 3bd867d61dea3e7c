"""Responses. Would catch events that do not add up to the response, and a conversation that loses its beginning."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from smoe.server.api_errors import ApiError
from smoe.server.response_input import messages_of
from smoe.server.response_store import ResponseStore
from tests.server.conftest import Running


def respond(running: Running, given: Any = "Who went to the park?", **fields: Any) -> Any:
    fields = {"temperature": 0, "max_output_tokens": 16, **fields}
    return running.client.responses.create(model="demo", input=given, **fields)


def test_a_response_is_what_chat_answers(running: Running) -> None:
    chat = running.chat(max_tokens=16)
    response = respond(running)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.output[0].role) == ("completed", "assistant")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert running.client.responses.retrieve(response.id).output_text == response.output_text
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Who went to the park?"}]}]
    assert respond(running, parts).output_text == response.output_text


def test_events_add_up_to_the_response(running: Running) -> None:
    with running.client.responses.stream(model="demo", input="Who went to the park?", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == respond(running, max_output_tokens=None).output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events if event.type != "response.output_text.delta"]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_response_that_is_cut_says_so(running: Running) -> None:
    response = respond(running, max_output_tokens=1)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_conversation_goes_on_by_name(running: Running) -> None:
    first = respond(running, "Tom has a red ball.", instructions="A story.")
    second = respond(running, "Who has a ball?", previous_response_id=first.id)
    said: list[Any] = [
        {"role": "user", "content": "Tom has a red ball."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Who has a ball?"},
    ]
    assert second.usage.input_tokens == running.chat(messages=said).usage.prompt_tokens  # instructions are not kept
    assert second.output_text == running.chat(messages=said, max_tokens=16).choices[0].message.content
    running.client.responses.delete(first.id)
    for lost in (first.id, "resp_never", respond(running, store=False).id):
        with pytest.raises(openai.NotFoundError) as error:
            respond(running, previous_response_id=lost)
        assert error.value.code == "response_not_found"


def test_items_of_stored_responses_may_be_sent_by_reference(running: Running) -> None:
    """As Vercel's AI SDK sends them. Would catch an item that is left out of the conversation."""
    first = respond(running, "Tom has a red ball.")
    said: list[Any] = [{"role": "user", "content": "Tom has a red ball."}, first.output[0].model_dump()]
    asked = {"role": "user", "content": "Who has a ball?"}
    by_reference = [said[0], {"type": "item_reference", "id": first.output[0].id}, asked]
    answers = [respond(running, given, store=False) for given in (by_reference, [*said, asked])]
    assert answers[0].usage.input_tokens == answers[1].usage.input_tokens
    assert answers[0].output_text == answers[1].output_text
    running.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no item 'msg_") as error:
        respond(running, by_reference)
    assert error.value.code == "item_not_found" and error.value.param == "input"


def test_text_can_be_made_to_keep_to_a_schema(running: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    assert json.loads(respond(running, text=form, max_output_tokens=40).output_text)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"given": []}, "input"),
        ({"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "computer"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ],
)
def test_what_cannot_be_done_is_refused(running: Running, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        respond(running, fields.pop("given", "x"), **fields)
    assert isinstance(refused.value.body, dict) and refused.value.body["param"] == param


def test_a_part_of_a_wrong_type_has_the_code_of_any_wrong_type(running: Running) -> None:
    for fields in (
        {"given": [{"role": "user", "content": 5}]},
        {"given": "x", "tools": [{"type": "function", "name": "f", "parameters": 5}]},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            respond(running, fields.pop("given"), **fields)
        assert refused.value.code == "invalid_type"


def test_calls_and_their_outputs_are_messages() -> None:
    given = [
        {"role": "user", "content": "How warm is it?"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "a", "name": "warmth", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "b", "name": "warmth", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "3 degrees"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Cold."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is cold."}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "lost"}], "summary": []},
        {"role": "user", "content": "And now?"},
    ]
    user, calls, output, answer, more = messages_of(given, lambda name: {})
    assert user == {"role": "user", "content": "How warm is it?"}
    assert [call["id"] for call in calls["tool_calls"]] == ["a", "b"] and calls["role"] == "assistant"
    assert output == {"role": "tool", "tool_call_id": "a", "content": "3 degrees"}
    assert answer == {"role": "assistant", "content": "It is cold.", "reasoning_content": "Cold."}
    assert more == {"role": "user", "content": "And now?"} and "reasoning_content" not in calls


def test_the_oldest_is_forgotten() -> None:
    kept = ResponseStore(most=3, most_bytes=1070)
    for number in range(5):
        kept.put({"id": str(number), "output": []}, [])
    assert len(kept) == 3 and kept.get("2")
    with pytest.raises(ApiError):
        kept.get("1")
    kept.put({"id": "long", "output": []}, [{"role": "user", "content": "x" * 1000}])
    assert len(kept) == 1 and kept.get("long")
    kept.put({"id": "too long", "output": []}, [{"role": "user", "content": "x" * 1100}])
    assert len(kept) == 0
