"""Tools through the API: a toy whose template has a place for them, made to call one. Would catch tools that never
reach the model, and calls that never reach the client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.server import answers, response_answers
from smoe.server.output.families import format_of
from tests.server.conftest import Running, served
from tests.toy import save_toy

FORMS = {
    "hermes": "<tool_call>{name, arguments}</tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama": "<|python_tag|>",
    "qwen": "<tool_call><function=x><parameter=y>",
    "gpt-oss": "<|start|><|channel|><|message|>",
}
ADDED: dict[str, list[AddedToken]] = {
    "hermes": [],
    "hermes, added": [AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")],
    "hermes, special": [AddedToken(text, special=True) for text in ("<tool_call>", "</tool_call>")],
    "mistral": [],
    "mistral, added": [AddedToken("[TOOL_CALLS]", special=True)],
    "llama": [],
    "qwen": [],
    "gpt-oss": [AddedToken(f"<|{text}|>", special=True) for text in ("start", "channel", "message", "end", "call")],
}
"""Tokens of the form that the tokenizer has. Those of Qwen3 are added ones that are not special: texts show them."""
TEMPLATE = (
    "{{% if tools %}}tools ({form}): {{{{ tools | tojson }}}} {{% endif %}}{{% for m in messages %}}{{{{ m['role'] }}}}"
    ": {{{{ m['content'] }}}}{{% if m['tool_calls'] %}}{{% for c in m['tool_calls'] %}}[{{{{ c['function']['name'] }}}}"
    " {{{{ c['function']['arguments']['city'] }}}}]{{% endfor %}}{{% endif %}}{{{{ '\n' }}}}{{% endfor %}}assistant:"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "says how it is",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("warmth", "time")
]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]

SENT_BY_OPEN_WEBUI = {
    "stream": True,
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello"}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_current_timestamp",
                "description": "Get the current Unix timestamp in seconds.",
                "parameters": {"properties": {}, "type": "object"},
            },
        },
        {
            "type": "function",
            "function": {
                "name": "ask_user",
                "description": "Ask the user clarifying questions before continuing.",
                "parameters": {
                    "properties": {
                        "questions": {"items": {"additionalProperties": True, "type": "object"}, "type": "array"},
                        "allow_other": {"default": True, "type": "boolean"},
                        "timeout_ms": {"default": 120000, "type": "integer"},
                    },
                    "required": ["questions"],
                    "type": "object",
                },
            },
        },
    ],
}
"""Two of the 36 tools that come with every message of Open WebUI 0.12, most of their descriptions left out."""


@pytest.fixture(scope="module", params=list(ADDED))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A toy of random weights with a template of each form, and the form's tokens."""
    form = request.param.partition(",")[0]
    folder: Path = save_toy(
        tmp_path_factory.mktemp("tools"),
        template=TEMPLATE.format(form=FORMS[form]),
        added=ADDED[request.param],
        max_position_embeddings=2048,
        num_hidden_layers=1,
    )
    model = from_pretrained(folder, memory="16MiB", context_tokens=1024, max_sequences=2)
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder)) as running:
        assert running.serving.prompts.takes_tools
        yield running


whatever_the_form = pytest.mark.parametrize("running", ["hermes"], indirect=True)
"""Of what does not depend on the form of calls."""


def form_of(running: Running) -> str:
    """The form of the model that is served."""
    return next(form for form, text in FORMS.items() if format_of(text) == running.serving.prompts.format)


def ask(running: Running, **fields: Any) -> Any:
    return running.chat("How warm is it?", tools=TOOLS, max_tokens=120, **fields)


def prompt_tokens(running: Running, **fields: Any) -> int:
    """The length of the same request's prompt."""
    answer = running.chat("How warm is it?", **{"tools": TOOLS, "max_tokens": 1, **fields})
    return int(answer.usage.prompt_tokens)


def test_a_model_can_be_made_to_call(running: Running) -> None:
    for choice, names in (
        ("required", {"warmth", "time"}),
        ({"type": "function", "function": {"name": "time"}}, {"time"}),
    ):
        answer = ask(running, tool_choice=choice).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls
        assert call.function.name in names and json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        assert call.type == "function" and call.id


def calls_of(deltas: Sequence[Any]) -> list[tuple[str, Any]]:
    """The calls of a stream, put together as clients do."""
    calls: list[tuple[str, str]] = []
    for part in [call for delta in deltas for call in delta.tool_calls or ()]:
        if part.index == len(calls):
            assert part.id and part.type == "function"
            calls.append((part.function.name, ""))
        assert part.index == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + part.function.arguments)
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_a_call_comes_in_a_stream(running: Running) -> None:
    whole = ask(running, tool_choice="required", seed=1).choices[0].message.tool_calls[0].function
    deltas = [chunk.choices[0] for chunk in ask(running, tool_choice="required", seed=1, stream=True)]
    assert calls_of([choice.delta for choice in deltas]) == [(whole.name, json.loads(whole.arguments))]
    assert "".join(choice.delta.content or "" for choice in deltas) == ""
    assert deltas[-1].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_is_a_call(running: Running) -> None:
    """Would catch a forced call that reaches the client as text where `max_tokens` ends it."""
    must = {"type": "function", "function": {"name": "time"}}
    whole = running.chat("How warm is it?", tools=TOOLS, max_tokens=120, tool_choice=must).usage.completion_tokens
    ending = {"hermes": "\n</tool_call>", "qwen": "\n</parameter>\n</function>\n</tool_call>"}.get(form_of(running), "")
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": must, "max_tokens": whole - len(ending) - 4}
    answer = running.chat("How warm is it?", **fields).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("length", None)
    assert [call.function.name for call in answer.message.tool_calls] == ["time"]
    deltas = [chunk.choices[0] for chunk in running.chat("How warm is it?", **fields, stream=True)]
    assert "".join(choice.delta.content or "" for choice in deltas) == "" and deltas[-1].finish_reason == "length"


def written(form: str, calls: Sequence[tuple[str, Any]]) -> str:
    """Calls as a model writes them."""
    texts = [
        json.dumps({"name": name, "parameters" if form == "llama" else "arguments": given}) for name, given in calls
    ]
    match form:
        case "llama":
            return "<|python_tag|>" + "; ".join(texts)
        case "mistral":
            return "".join(f"[TOOL_CALLS][{text}]" for text in texts)
        case "gpt-oss":
            heads = [f"<|start|>assistant<|channel|>commentary to=functions.{name}<|message|>" for name, _ in calls]
            given = [json.dumps(arguments) for _, arguments in calls]
            return (
                "<|end|>" + "<|call|>".join(head + text for head, text in zip(heads, given, strict=True)) + "<|call|>"
            )
        case "qwen":
            return "\n".join(
                f"<tool_call><function={name}>\n<parameter=city>\n{given['city']}\n</parameter>\n</function></tool_call>"
                for name, given in calls
            )
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def framed(form: str, before: str, calls: Sequence[tuple[str, Any]], after: str) -> str:
    """A text with calls in it."""
    if form != "gpt-oss":
        return f"{before}{written(form, calls)}{after}"
    final = "<|channel|>final<|message|>"
    return f"{final}{before}{written(form, calls)}<|start|>assistant{final}{after}"


def test_text_around_calls_stays(running: Running, script: Callable[[str], None]) -> None:
    """Whole, and token by token: the second call has the marks of other forms in a string."""
    form = form_of(running)
    odd = "".join(FORMS[name] for name in ("mistral", "llama")) + '"}]}\\'
    calls = [("warmth", {"city": "Oslo"}), ("time", {"city": odd})]
    script(framed(form, "I see.", calls, "\nSo."))
    answer = running.chat("How warm is it?", tools=TOOLS, max_tokens=400).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("I see.\nSo.", "tool_calls")
    found = [call.function for call in answer.message.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    deltas = [chunk.choices[0].delta for chunk in running.chat(tools=TOOLS, max_tokens=400, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "I see.\nSo."
    assert calls_of(deltas) == calls


def test_an_answer_has_one_call_where_parallel_ones_are_not_wanted(
    running: Running, script: Callable[[str], None]
) -> None:
    form = form_of(running)
    script(framed(form, "I see.", [(name, {"city": "Oslo"}) for name in ("warmth", "time")], "\nSo."))
    fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": 400, "parallel_tool_calls": False}
    answer = running.chat(**fields).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("I see.", "tool_calls")
    assert [call.function.name for call in answer.message.tool_calls] == ["warmth"]
    chunks = [chunk.choices[0] for chunk in running.chat(**fields, stream=True)]
    assert calls_of([chunk.delta for chunk in chunks]) == [("warmth", {"city": "Oslo"})]
    assert chunks[-1].finish_reason == "tool_calls"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I see."


@whatever_the_form
def test_a_response_has_one_call_where_parallel_ones_are_not_wanted(
    running: Running, script: Callable[[str], None]
) -> None:
    script(framed("hermes", "I see.", [(name, {"city": "Oslo"}) for name in ("warmth", "time")], "\nSo."))
    asked = {"model": "demo", "input": "x", "tools": FLAT, "max_output_tokens": 400}
    response = running.client.responses.create(**asked, parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert not response.parallel_tool_calls
    both = running.client.responses.create(**asked, parallel_tool_calls=True).output
    assert [item.type for item in both].count("function_call") == 2


def test_an_answer_that_is_json_is_no_call(running: Running, script: Callable[[str], None]) -> None:
    text = '{"name": "Alice", "age": 7}'
    script(f"<|channel|>final<|message|>{text}" if form_of(running) == "gpt-oss" else text)
    answer = running.chat(tools=TOOLS, max_tokens=100).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (text, None, "stop")


@whatever_the_form
def test_a_tool_may_have_definitions_and_contain_itself(running: Running) -> None:
    node = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["city"], "additionalProperties": False}  # fmt: skip
    trip = {"type": "function", "function": {"name": "trip", "parameters": {"$defs": {"Node": node}, **node}}}
    answer = running.chat(tools=[*TOOLS, trip], tool_choice="required", max_tokens=200, temperature=1, seed=2)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_tools_reach_the_prompt_unless_none_is_to_be_called(running: Running) -> None:
    without, plain = prompt_tokens(running, tool_choice="none"), prompt_tokens(running, tools=[])
    assert prompt_tokens(running) > without == plain


def test_a_call_and_its_result_go_into_the_next_prompt(running: Running) -> None:
    call = ask(running, tool_choice="required").choices[0].message
    messages = [{"role": "user", "content": "How warm is it?"}, call, {
        "role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "3 degrees"
    }]  # fmt: skip
    with_result = prompt_tokens(running, messages=messages)
    city = json.loads(call.tool_calls[0].function.arguments)["city"]
    written = (
        f"user: How warm is it?\nassistant: [{call.tool_calls[0].function.name} {city}]\ntool: 3 degrees\nassistant:"
    )
    assert with_result == prompt_tokens(running) - len("user: How warm is it?\nassistant:") + len(written)


def test_a_response_calls_too(running: Running) -> None:
    asked = {"model": "demo", "input": "How warm is it?", "tools": FLAT, "tool_choice": "required", "temperature": 0}
    first = running.client.responses.create(**asked)
    (call,) = first.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    events = list(running.client.responses.create(**asked, stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done[0].arguments == call.arguments and events[-1].response.output[0].name == call.name
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"}
    goes_on = running.client.responses.create(
        model="demo", input=[output], previous_response_id=first.id, max_output_tokens=2
    )
    assert goes_on.usage.input_tokens > len("How warm is it?") + len("3 degrees") + len(call.name)


@whatever_the_form
def test_functions_of_a_namespace_are_called_by_both_names(running: Running) -> None:
    """As codex offers those for its agents."""
    space = {"type": "namespace", "name": "sky", "description": "Weather", "tools": FLAT}
    asked = {"model": "demo", "input": "How warm is it?", "tools": [space], "tool_choice": "required", "temperature": 0}
    first = running.client.responses.create(**asked)
    (call,) = first.output
    assert (call.namespace, call.name) in [("sky", tool["name"]) for tool in FLAT]
    (streamed,) = list(running.client.responses.create(**asked, stream=True))[-1].response.output
    assert (streamed.namespace, streamed.name, streamed.arguments) == ("sky", call.name, call.arguments)
    response_answers.ResponseAnswer.model_validate(json.loads(running.http("POST", "/v1/responses", asked).text))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3 degrees"}
    question = {"role": "user", "content": "How warm is it?"}
    again = {"model": "demo", "tools": [space], "max_output_tokens": 2}
    by_id = running.client.responses.create(**again, input=[output], previous_response_id=first.id)
    sent = running.client.responses.create(**again, input=[question, call.model_dump(), output])
    assert by_id.usage.input_tokens == sent.usage.input_tokens


@pytest.mark.parametrize("running", ["hermes", "gpt-oss"], indirect=True)
def test_calls_are_answered_as_is_described(running: Running) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 120}
    response = {"model": "demo", "input": "x", "tools": FLAT}
    for path, body, whole, event in (
        ("/v1/chat/completions", chat, answers.ChatCompletion, answers.ChatChunk),
        ("/v1/responses", response, response_answers.ResponseAnswer, response_answers.ResponseEvent),
    ):
        asked = {**body, "tool_choice": "required", "temperature": 0}
        whole.model_validate(json.loads(running.http("POST", path, asked).text))
        told = running.http("POST", path, {**asked, "stream": True}).text.splitlines()
        for line in told:
            if line.startswith("data: {"):
                event.model_validate(json.loads(line.removeprefix("data: ")))
        assert '"arguments"' in "".join(told)


@whatever_the_form
def test_choices_have_other_spellings(running: Running) -> None:
    """Those of Anthropic, of other servers, and OpenAI's list of allowed tools."""
    time = {"type": "function", "function": {"name": "time"}}
    lists = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [time]}}
    for choice in ("any", {"type": "any"}, {"type": "required"}, {"type": "tool", "name": "time"}, lists):
        (call,) = ask(running, tool_choice=choice).choices[0].message.tool_calls
        assert call.function.name == "time" or choice not in (lists, {"type": "tool", "name": "time"})
    assert prompt_tokens(running, tool_choice={"type": "none"}) < prompt_tokens(running)


@whatever_the_form
def test_a_choice_of_no_tool_is_refused(running: Running) -> None:
    for choice in ({"type": "function", "function": {"name": "other"}}, "perhaps", {"type": "king"}):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(running, tool_choice=choice)
        assert isinstance(refused.value.body, dict) and refused.value.body["param"] == "tool_choice"


@whatever_the_form
def test_what_open_webui_sends_is_taken(running: Running) -> None:
    answer = running.http("POST", "/v1/chat/completions", {**SENT_BY_OPEN_WEBUI, "max_tokens": 4})
    assert answer.status == 200 and answer.text.endswith("data: [DONE]\n\n") and '"error"' not in answer.text
    must = {**SENT_BY_OPEN_WEBUI, "stream": False, "tool_choice": "required", "max_tokens": 4}
    assert running.http("POST", "/v1/chat/completions", must).status == 200, "its schemas can be kept to"
