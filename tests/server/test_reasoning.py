"""Reasoning through the API: beside the answer, in streams and in responses. Would catch reasoning that is shown as the
answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.server import answers, response_answers
from tests.server.conftest import Running, served
from tests.toy import save_toy

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['reasoning_content'] }}{{ m['content'] }}\n{% endfor %}assistant:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"
)
QUESTION = {"role": "user", "content": "And?"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A toy whose template has it think unless told otherwise."""
    folder: Path = save_toy(tmp_path_factory.mktemp("thinks"), template=TEMPLATE, max_position_embeddings=2048)
    model = from_pretrained(folder, memory="16MiB", context_tokens=1024, max_sequences=2)
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder)) as running:
        yield running


def test_clients_get_thoughts_beside_the_answer(running: Running, script: Callable[[str], None]) -> None:
    script("I see.\n</think>\n\nYes.")
    answer = running.chat(max_tokens=100)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("I see.", "Yes.")
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("I see.\n</think>")
    deltas = [chunk.choices[0].delta for chunk in running.chat(max_tokens=100, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I see."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    cut = running.chat(max_tokens=4).choices[0]
    assert (cut.message.reasoning_content, cut.message.content, cut.finish_reason) == ("I se", "", "length")


def test_a_continued_message_may_end_within_a_thought(running: Running, script: Callable[[str], None]) -> None:
    script(" see.\n</think>\n\nYes.")
    question = {"role": "user", "content": "Is it?"}
    go_on = {"extra_body": {"continue_final_message": True}, "max_tokens": 100}
    for begun, thought, said in (("<think>I", " see.", "Yes."), ("<think>a</think>I", None, " see.\n</think>\n\nYes.")):
        answer = running.chat(messages=[question, {"role": "assistant", "content": begun}], **go_on).choices[0].message
        assert (getattr(answer, "reasoning_content", None), answer.content) == (thought, said)


def test_thoughts_are_described(running: Running, script: Callable[[str], None]) -> None:
    script("I see.\n</think>\n\nYes.")
    chat = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100}
    response = {"model": "demo", "input": "x", "max_output_tokens": 100}
    for path, body, whole, event in (
        ("/v1/chat/completions", chat, answers.ChatCompletion, answers.ChatChunk),
        ("/v1/responses", response, response_answers.ResponseAnswer, response_answers.ResponseEvent),
    ):
        answer = running.http("POST", path, body).text
        assert "I see." in answer
        whole.model_validate_json(answer)
        told = running.http("POST", path, {**body, "stream": True, "stream_options": {"include_usage": True}}).text
        lines = [line.removeprefix("data: ") for line in told.splitlines() if line.startswith("data: {")]
        assert any("reasoning" in line for line in lines)
        for line in lines:
            event.model_validate_json(line)


def test_a_template_that_is_told_not_to_think_has_answers_alone(
    running: Running, script: Callable[[str], None]
) -> None:
    script("Yes.")
    message = running.chat(max_tokens=100, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0]
    assert message.message.content == "Yes." and not hasattr(message.message, "reasoning_content")


def test_what_must_keep_to_a_form_is_the_answer(running: Running) -> None:
    schema = {"name": "s", "schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    form = {"type": "json_schema", "json_schema": schema}
    message = running.chat(max_tokens=20, response_format=form).choices[0].message
    assert message.content == "{}" and not hasattr(message, "reasoning_content")


def test_responses_have_an_item_of_it(running: Running, script: Callable[[str], None]) -> None:
    script("I see.</think>Yes.")
    response = running.client.responses.create(model="demo", input="Hi", max_output_tokens=100)
    thought, _ = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "I see.")
    assert response.output_text == "Yes." and response.usage.output_tokens_details.reasoning_tokens > 0
    events = list(running.client.responses.create(model="demo", input="Hi", max_output_tokens=100, stream=True))
    said = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert said == "I see." and events[-1].response.output[1].content[0].text == "Yes."
    assert [event.sequence_number for event in events] == list(range(len(events)))
    sent_again = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in response.output), QUESTION]
    counts = {
        running.client.responses.create(model="demo", max_output_tokens=1, **asked).usage.input_tokens
        for asked in ({"input": [QUESTION], "previous_response_id": response.id}, {"input": sent_again})
    }
    assert counts == {len("user: Hi\nassistant: I see.Yes.\nuser: And?\nassistant:<think>\n")}
    again = running.client.responses.create(
        model="demo", input="And?", previous_response_id=response.id, max_output_tokens=100
    )
    assert again.output_text == "Yes."
