"""Tools of `/v1/responses` that are no functions: custom tools, with and without a grammar, and shells. Would catch a
call that OpenAI's client cannot read, text that breaks its grammar, and a result that the model does not get."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai.types.responses import (
    ResponseCustomToolCall,
    ResponseFunctionShellToolCall,
    ResponseShellCallCommandDoneEvent,
    ResponseStreamEvent,
)
from openai.types.responses.response_output_item import LocalShellCall
from pydantic import TypeAdapter
from tokenizers import AddedToken
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.server import response_answers, talk
from smoe.server.constraints import Copied
from smoe.server.output.output_reader import Part
from smoe.server.response_calls import call_item
from smoe.server.response_input import messages_of
from smoe.server.response_tools import ToolOrigin, offered_tools
from tests.clients.scripted import TEMPLATE
from tests.server.conftest import Running, served
from tests.toy import save_toy

ADDED = [AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")]
PATCH = {"type": "custom", "name": "patch", "description": "Changes a file."}
LARK = r"""
start: begin line~1..2 end   // a patch
begin: "*** Begin" LF
line: ("+" | "-") /[a-z ]{0,4}/ LF -> line
end: "*** \"End\"" LF?
%import common.LF
"""
DOUBLING = 'z: "' + "x" * 90_000 + '"\nstart: ' + "z " * 2_000
"""A grammar that as a regular expression has 180 MB."""
NESTED = "start: r0\n" + "\n".join(f"r{n}: {'(' * 45}r{n + 1}{')' * 45}" for n in range(48)) + '\nr48: "x"'
WITH_LARK = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
WITH_REGEX = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "(yes|no)/[0-9]{2}"}}
QUESTION = {"role": "user", "content": "Change it."}


@pytest.fixture(scope="module", params=["json", "tagged"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Toys whose calls are JSON, or have arguments as plain text between marks."""
    template = TEMPLATE if request.param == "json" else "{# <function=x><parameter=y> #}" + TEMPLATE
    folder: Path = save_toy(
        tmp_path_factory.mktemp("custom"),
        template=template,
        added=ADDED,
        max_position_embeddings=4096,
        num_hidden_layers=1,
    )
    model = from_pretrained(folder, memory="24MiB", context_tokens=4096, max_sequences=2)
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder)) as running:
        yield running


def written(running: Running, name: str, arguments: dict[str, Any]) -> str:
    """A call as the model of a toy writes it."""
    if "<function=" not in running.serving.tokenizer.chat_template:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    given = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def whole_and_streamed(running: Running, **fields: Any) -> tuple[Any, list[Any]]:
    """A response and the events of the same response, as OpenAI's client reads them, and as the API is described."""
    asked = {"model": "demo", "input": [QUESTION], "temperature": 0, **fields}
    whole = running.client.responses.with_raw_response.create(**asked)
    response_answers.ResponseAnswer.model_validate_json(whole.text)
    sent = running.http("POST", "/v1/responses", asked | {"stream": True}).text
    data = [each.partition("\n")[0] for each in sent.split("data: ")[1:]]
    for each in data:
        response_answers.ResponseEvent.model_validate_json(each)
    events = [TypeAdapter[Any](ResponseStreamEvent).validate_json(each) for each in data]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return whole.parse(), events


def test_a_custom_tool_gets_a_text(running: Running, script: Callable[[str], None]) -> None:
    text = 'Say "x"\n\\ and {}'
    script("Wait." + written(running, "patch", {"input": text}))
    whole, events = whole_and_streamed(running, tools=[PATCH])
    message, call = whole.output
    assert isinstance(call, ResponseCustomToolCall) and message.content[0].text == "Wait."
    assert (call.name, call.input, call.namespace) == ("patch", text, None)
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    assert "".join(event.delta for event in deltas) == done.input == text and len(deltas) > 5
    assert {event.item_id for event in deltas} == {done.item_id} == {events[-1].response.output[1].id}
    assert events[-1].response.output[1].input == text


def test_a_local_shell_gets_a_command(running: Running, script: Callable[[str], None]) -> None:
    given = {"command": ["ls", "-l", 'a "b"'], "working_directory": "/tmp", "env": {"A": "1"}, "timeout_ms": 500}
    script(written(running, "local_shell", given))
    whole, events = whole_and_streamed(running, tools=[{"type": "local_shell"}])
    (call,) = whole.output
    assert isinstance(call, LocalShellCall) and call.status == "completed"
    assert call.action.to_dict() == {"type": "exec", **given}
    assert events[-1].response.output[0].action == call.action


def test_a_shell_gets_commands(running: Running, script: Callable[[str], None]) -> None:
    script(written(running, "shell", {"commands": ["cd /tmp", "ls"], "max_output_length": 99}))
    whole, events = whole_and_streamed(running, tools=[{"type": "shell", "environment": {"type": "local"}}])
    (call,) = whole.output
    assert isinstance(call, ResponseFunctionShellToolCall) and call.status == "completed"
    assert (call.action.commands, call.action.max_output_length) == (["cd /tmp", "ls"], 99)
    done = [event for event in events if isinstance(event, ResponseShellCallCommandDoneEvent)]
    assert [(event.command_index, event.command) for event in done] == [(0, "cd /tmp"), (1, "ls")]


@pytest.mark.parametrize("tool", [WITH_LARK, WITH_REGEX, {"type": "local_shell"}, {"type": "shell"}])
def test_a_required_call_matches(running: Running, tool: dict[str, Any]) -> None:
    """Random weights write nothing that a grammar does not force them to."""
    choice = {key: tool[key] for key in ("type", "name") if key in tool}
    asked = {"model": "demo", "input": [QUESTION], "temperature": 0, "max_output_tokens": 140}
    (call,) = running.client.responses.create(
        **asked, tools=[PATCH | {"name": "other"}, tool], tool_choice=choice
    ).output
    if tool is WITH_LARK:
        matched(call.input)
    elif tool is WITH_REGEX:
        assert call.input[:-2] in ("yes/", "no/") and call.input[-2:].isdigit()
    else:
        assert call.type == f"{tool['type']}_call"


def matched(text: str) -> None:
    """Check a text against the grammar by llguidance, which compiles Lark itself."""
    import llguidance

    from smoe.server.grammar_tokens import grammar_tokens
    from tests.toy import ascii_tokenizer

    tokenizer = ascii_tokenizer("")
    tokens = grammar_tokens(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(LARK))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting(), text


class Inclined:
    """A constraint that makes the tokens of a text the likeliest, as long as the grammar allows them."""

    def __init__(self, grammar: Copied | None, tokens: list[int]) -> None:
        self._grammar, self._tokens, self._taken = grammar, tokens, list[int]()

    def narrow(self, logits: torch.Tensor) -> None:
        logits.zero_()
        if self._taken == self._tokens[: len(self._taken)] and len(self._taken) < len(self._tokens):
            logits[self._tokens[len(self._taken)]] = 1.0
        if self._grammar is not None:
            self._grammar.narrow(logits)

    def take(self, token: int) -> None:
        self._taken.append(token)
        if self._grammar is not None:
            self._grammar.take(token)

    def another(self) -> Inclined:
        return self


def test_a_call_that_is_not_required_matches_too(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that would write another input in its second call, after an answer and a right one."""
    right, wrong = (written(running, "patch", {"input": text}) for text in ("yes/12", "yes/1x"))
    texts_of, tokenizer = talk.texts_of, running.serving.tokenizer
    ids = tokenizer.encode(f"I see.{right}\n{wrong}", add_special_tokens=False)

    def asked(prompt: Any, sampling: Any, count: int, logprobs: int | None, constraint: Any, *images: Any) -> Any:
        return texts_of(prompt, sampling, count, logprobs, Inclined(constraint, ids), *images)

    monkeypatch.setattr(talk, "texts_of", asked)
    respond = running.client.responses.create
    fields: dict[str, Any] = {"model": "demo", "input": [QUESTION], "temperature": 0, "max_output_tokens": len(ids)}
    message, first, second = respond(**fields, tools=[WITH_REGEX]).output[:3]
    assert message.content[0].text == "I see." and first.input == "yes/12"
    assert second.input.startswith("yes/1") and "x" not in second.input
    assert respond(**fields, tools=[PATCH]).output[2].input == "yes/1x", "without a grammar nothing forbids it"


def test_results_of_all_kinds_reach_the_model(running: Running, script: Callable[[str], None]) -> None:
    """Sent back by the client, or continued by id."""
    tools = [PATCH, {"type": "local_shell"}, {"type": "shell"}]
    for name, arguments, result in (
        ("patch", {"input": 'a "b"'}, {
            "type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "done"}]
        }),
        ("local_shell", {"command": ["ls"], "env": {"A": "b"}}, {"type": "local_shell_call_output", "output": "done"}),
        ("shell", {"commands": ["ls"]}, {
            "type": "shell_call_output",
            "output": [{"stdout": "done", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        }),
    ):  # fmt: skip
        script(written(running, name, arguments))
        first = running.client.responses.create(model="demo", input=[QUESTION], tools=tools)
        (call,) = first.output
        named = {"call_id": call.call_id} if name != "local_shell" else {"id": call.id}
        (_, calling, answer) = messages_of([QUESTION, call.to_dict(), {**result, **named}], lambda name: {})
        assert calling["tool_calls"][0]["function"]["name"] == name
        assert json.loads(calling["tool_calls"][0]["function"]["arguments"]) == arguments
        assert answer["tool_call_id"] == calling["tool_calls"][0]["id"] == call.call_id and "done" in answer["content"]
        script("So it is.")
        sent = running.client.responses.create(
            model="demo", input=[QUESTION, call.to_dict(), {**result, **named}], tools=tools
        )
        by_id = running.client.responses.create(
            model="demo", input=[{**result, **named}], previous_response_id=first.id, tools=tools
        )
        assert sent.output_text == by_id.output_text == "So it is."
        assert sent.usage.input_tokens == by_id.usage.input_tokens


@pytest.mark.parametrize(
    ("kind", "arguments", "item"),
    [
        ("custom", '{"text": "x"}', {"input": '{"text": "x"}', "status": "completed"}),
        ("custom", '{ "input": "\\ud83d\\ude00 \\u00fc\\n"}', {"input": "\U0001f600 \u00fc\n", "status": "completed"}),
        ("custom", "no JSON", {"input": "no JSON", "status": "completed"}),
        ("custom", '{"input": "half \\ud83', {"input": "half ", "status": "completed"}),
        ("custom", r'{"input": "find(\d+)\n"}', {"input": "find(\\d+)\n", "status": "completed"}),
        ("custom", r'{"input": "C:\users\ud800!"}', {"input": r"C:\users\ud800!", "status": "completed"}),
        ("custom", r'{"input": "\ud83dx\\ \""}', {"input": '\\ud83dx\\ "', "status": "completed"}),
        ("local_shell", '{"command": "ls | wc"}', {"status": "completed"}),
        ("local_shell", '{"command": ["ls"', {"status": "incomplete"}),
        ("shell", '{"commands": "ls"}', {"status": "completed"}),
        ("shell", '{"commands": [5]}', {"status": "incomplete"}),
    ],
)
def test_calls_of_another_form_are_items(kind: str, arguments: str, item: dict[str, Any]) -> None:
    call = call_item(Part("call", "name", "call_1"), ToolOrigin(kind))
    events = [event for character in arguments for event in call.write(character)]
    events += call.end(is_cut_off=False)
    assert call.item.items() >= item.items()
    assert "".join(what["delta"] for name, what in events if name.startswith("custom") and "delta" in what) == (
        item.get("input", "")
    )
    if kind == "local_shell":
        command = ["bash", "-lc", "ls | wc"] if item["status"] == "completed" else []
        assert call.item["action"] == {"type": "exec", "command": command, "env": {}}


def test_the_model_gets_the_grammar() -> None:
    offered = offered_tools([WITH_LARK, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [PATCH]}])
    lark, inner = (tool["function"] for tool in offered.functions)
    assert (
        lark["description"].startswith("Changes a file.\n\nThe input must match this Lark grammar:")
        and LARK in lark["description"]
    )
    assert (inner["name"], offered.origins["n.patch"]) == ("n.patch", ToolOrigin("custom", "patch", "n"))
    assert list(offered.enforced) == ["patch"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "shell", "environment": {"type": "container_auto"}}], "runs no commands"),
        ([{"type": "custom"}], "with a 'name'"),
        ([PATCH | {"format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}}], "lark or regex"),
        ([PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "("}}], "cannot be enforced"),
        ([PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}}],
         "the rule 'start' contains itself"),
        ([PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": DOUBLING}}], "100000 characters"),
        ([PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": NESTED}}], "nested too deeply|levels"),
        ([{"type": "local_shell"}, {"type": "function", "name": "local_shell"}], "two tools of the name"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(running: Running, tools: list[Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        running.client.responses.create(model="demo", input="x", tools=tools)
    assert refused.value.param == "tools"
