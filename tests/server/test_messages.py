"""Anthropic's Messages API: whole, in streams, with tools and reasoning. Would catch an agent's request that is
refused, and an event that its client cannot read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.server import answers
from tests.server.conftest import Running, served
from tests.toy import save_toy

TEMPLATE = (
    "{% if tools %}tools <tool_call>: {{ tools | tojson }} {% endif %}{% for m in messages %}{{ m['role'] }}: "
    "{{ m['reasoning_content'] }}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}[{{ c['function']['name'] }} "
    "{{ c['function']['arguments']['city'] }}]{% endfor %}"
    "{% if not loop.last or m['role'] != 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
    "{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [{"name": "warmth", "description": "says how it is", "input_schema": CITY}]
ASKED = {"model": "claude-any", "max_tokens": 400, "messages": [{"role": "user", "content": "How warm is it?"}]}
CALL = '<tool_call>{"name": "warmth", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = save_toy(tmp_path_factory.mktemp("messages"), template=TEMPLATE, max_position_embeddings=2048)
    model = from_pretrained(folder, memory="16MiB", context_tokens=1024, max_sequences=2)
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder), api_key="a-key") as running:
        yield running


def ask(running: Running, path: str = "/v1/messages?beta=true", **fields: Any) -> Any:
    answer = running.http(
        "POST", path, {**ASKED, **fields}, **{"x-api-key": "a-key", "anthropic-version": "2023-06-01"}
    )
    assert answer.status == 200, answer.text
    if not fields.get("stream"):
        return json.loads(answer.text)
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as clients put it together."""
    for event in events:
        answers.MessageEvent.model_validate(event)
    message = dict(events[0]["message"], content=[])
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                given = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    given += delta["partial_json"]
                else:
                    block[block["type"]] += delta[block["type"]]
            case "content_block_stop":
                if message["content"][event["index"]]["type"] == "tool_use":
                    message["content"][event["index"]]["input"] = json.loads(given)
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    assert events[-1]["type"] == "message_stop"
    return message


def test_reasoning_text_and_calls_are_blocks(running: Running, script: Callable[[str], None]) -> None:
    script(f"I see.</think>So: {CALL}")
    fields: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": TOOLS, "betas": ["x"]}
    answer = ask(running, **fields)
    answers.MessageAnswer.model_validate(answer)
    thinking, text, call = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "I see.")
    assert text == {"type": "text", "text": "So: "} and call.pop("id")
    assert call == {"type": "tool_use", "name": "warmth", "input": {"city": "Oslo"}}
    assert (answer["stop_reason"], answer["model"]) == ("tool_use", "claude-any")
    streamed = put_together(ask(running, **fields, stream=True))
    assert [{**block, "id": ""} for block in streamed["content"]] == [
        {**block, "id": ""} for block in (thinking, text, call)
    ]
    assert streamed["stop_reason"] == "tool_use"
    cached = streamed["usage"]["cache_read_input_tokens"]
    assert cached > 0 and streamed["usage"]["input_tokens"] + cached == sum(
        answer["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


def test_arguments_that_are_not_json_are_not_left_out(running: Running, script: Callable[[str], None]) -> None:
    """Would catch a call without arguments where the model has given some."""
    for written in ('{"city": Oslo}', '{"city": "Oslo"', '{"city": "Os'):
        script(f'<tool_call>{{"name": "warmth", "arguments": {written}')
        (call,) = ask(running, tools=TOOLS)["content"]
        assert call["input"] == {"INVALID_JSON": written}


def test_a_call_can_be_required(running: Running) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "warmth", "disable_parallel_tool_use": True}):
        answer = ask(running, tools=TOOLS, tool_choice=choice)
        assert [block["type"] for block in answer["content"]] == ["tool_use"]
        assert answer["content"][0]["input"]["city"] in ("Oslo", "Rome") and answer["stop_reason"] == "tool_use"


def test_a_conversation_goes_on_with_results_of_tools(running: Running) -> None:
    """Counted: the prompt is what the template writes, one token a character."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Q", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "T", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "warmth", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "system", "content": "S2"},
    ]
    body = {"messages": messages, "system": [{"type": "text", "text": "S1"}]}
    expected = "system: S1\nuser: Q\nassistant: T[warmth Oslo]\ntool: 3\nuser: So?\nsystem: S2\nassistant:"
    assert ask(running, "/v1/messages/count_tokens", **body) == {"input_tokens": len(expected)}
    hidden = {"tools": TOOLS, "tool_choice": {"type": "none"}}
    assert ask(running, "/v1/messages/count_tokens", **body, **hidden) == {"input_tokens": len(expected)}
    usage = ask(running, **body, max_tokens=1)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(expected) and usage["output_tokens"] == 1


def test_a_last_message_of_the_assistant_is_continued(running: Running, script: Callable[[str], None]) -> None:
    script("lo.")
    answer = ask(running, messages=[*ASKED["messages"], {"role": "assistant", "content": "Os"}])  # type: ignore[misc]
    assert answer["content"] == [{"type": "text", "text": "lo."}] and answer["stop_reason"] == "end_turn"
    script("a STOP b")
    stopped = ask(running, stop_sequences=["STOP"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "STOP")
    assert stopped["content"] == [{"type": "text", "text": "a "}]
    assert ask(running, max_tokens=1)["stop_reason"] == "max_tokens"


def test_errors_have_anthropics_form(running: Running) -> None:
    key = {"x-api-key": "a-key"}
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    for body, headers, status, kind in (
        (ASKED, {}, 401, "authentication_error"),
        ({**ASKED, "max_tokens": 0}, key, 400, "invalid_request_error"),
        ({**ASKED, "messages": image}, key, 400, "invalid_request_error"),
        (
            {**ASKED, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            key,
            400,
            "invalid_request_error",
        ),
    ):
        answer = running.http("POST", "/v1/messages", body, **headers)
        assert answer.status == status and json.loads(answer.text)["error"]["type"] == kind
        answers.MessageRefusal.model_validate_json(answer.text)
    assert json.loads(running.http("GET", "/v1/messages/x", **key).text)["error"]["type"] == "not_found_error"


def test_a_long_prompt_has_anthropics_words(running: Running) -> None:
    """Claude Code reads the two numbers, and then shortens the conversation."""
    body = {**ASKED, "messages": [{"role": "user", "content": "x" * 1200}]}
    answer = running.http("POST", "/v1/messages", body, **{"x-api-key": "a-key"})
    message = json.loads(answer.text)["error"]["message"]
    found = re.match(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)
    assert answer.status == 400 and found is not None and int(found[1]) > 1200 and found[2] == "1024", message


def test_clients_are_asked_to_go_on_without_threads(running: Running) -> None:
    """By the words at which Anthropic's tool runner sends the request again, whole."""
    body = {**ASKED, "thread": {"type": "create"}}
    answer = running.http("POST", "/v1/messages", body, **{"x-api-key": "a-key"})
    error = json.loads(answer.text)["error"]
    assert answer.status == 400 and error["details"]["error_code"] == "thread_unsupported_request"
    answers.MessageRefusal.model_validate_json(answer.text)


def test_anthropics_client_reads_it(running: Running, script: Callable[[str], None]) -> None:
    anthropic = pytest.importorskip("anthropic")
    script(f"So: {CALL}")
    client = anthropic.Anthropic(base_url=running.url, api_key="a-key", max_retries=0)
    with client.beta.messages.stream(**ASKED, tools=TOOLS) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "So: " and message.content[1].input == {"city": "Oslo"} and message.stop_reason == "tool_use"
    assert client.messages.count_tokens(model="x", messages=ASKED["messages"]).input_tokens > 10
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**ASKED)
