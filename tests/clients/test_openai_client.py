"""OpenAI's client for Python, by every way of its own to ask. Would catch an answer that its helpers cannot read."""

from __future__ import annotations

import openai
import pytest

from tests.clients.scripted import RESULT
from tests.clients.values import ASKED, QUESTION, TOOL, Person
from tests.server.conftest import Running


def test_a_call_goes_forth_and_back(running: Running) -> None:
    create = running.client.chat.completions.create
    first = create(model="demo", messages=ASKED, tools=[TOOL]).choices[0]
    (call,) = first.message.tool_calls or []
    assert first.finish_reason == "tool_calls" and (call.function.name, first.message.content) == ("warmth", "Wait.")
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    second = create(model="demo", messages=[*ASKED, first.message, result], tools=[TOOL])
    assert second.choices[0].message.content == "It is cold."


def test_the_clients_own_streams_and_parsers(running: Running) -> None:
    chat = running.client.chat.completions
    with chat.stream(model="demo", messages=ASKED, tools=[TOOL], stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert final.usage.completion_tokens > 10
    assert isinstance(
        chat.parse(model="demo", messages=ASKED, response_format=Person).choices[0].message.parsed, Person
    )
    with chat.stream(model="demo", messages=ASKED, response_format=Person) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_responses_with_calls(running: Running) -> None:
    responses = running.client.responses
    tool = {"type": "function", **TOOL["function"]}
    first = responses.create(model="demo", input=QUESTION, tools=[tool])
    (call,) = (item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = responses.create(model="demo", previous_response_id=first.id, input=[result], tools=[tool])
    assert second.output_text == "It is cold."
    sent_again = [*ASKED, *(item.model_dump(exclude_none=True) for item in first.output), result]
    assert responses.create(model="demo", input=sent_again, tools=[tool], store=False).output_text == "It is cold."
    assert isinstance(responses.parse(model="demo", input=QUESTION, text_format=Person).output_parsed, Person)
    with responses.stream(model="demo", input=QUESTION, tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output[-1].arguments == '{"city": "Oslo"}'
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_settings_probabilities_and_errors(running: Running) -> None:
    create = running.client.chat.completions.create
    choice = create(model="demo", messages=ASKED, logprobs=True, top_logprobs=2, stop=[","], seed=5).choices[0]
    assert choice.message.content == "Hello there" and len(choice.logprobs.content[0].top_logprobs) == 2
    with pytest.raises(openai.BadRequestError, match="temperature"):
        create(model="demo", messages=ASKED, temperature=9)
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        create(model="other", messages=ASKED)
    with pytest.raises(openai.AuthenticationError):
        running.client.with_options(api_key="wrong").models.list()
    assert [model.id for model in running.client.models.list()] == ["demo"]
