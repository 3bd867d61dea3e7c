"""How much of what llama.cpp's chat tests publish is read as they read it: calls, reasoning, and cut anywhere.

SMOE_LLAMA_CPP names a source tree of llama.cpp; without it only the reader of its tests is tested. The counts below are
what is read today: they may only rise.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from smoe.conversation.chat_template import ChatTemplate
from smoe.conversation.conversation import Conversation
from smoe.errors import ChatTemplateError
from smoe.server.output.families import format_of
from smoe.server.output.output_format import At
from smoe.server.output.output_reader import OutputReader
from tests.server.published_outputs import Call, Case, Expected, Tool, cases
from tests.toy import ascii_tokenizer

_FOLDER = Path(os.environ.get("SMOE_LLAMA_CPP", "/nonexistent"))
needs_archive = pytest.mark.skipif(
    not (_FOLDER / "tests" / "test-chat.cpp").exists(), reason="SMOE_LLAMA_CPP names no source tree of llama.cpp"
)
CALLS, REASONING = 306, 168
"""Cases of the archive of llama-cpp-python 0.3.36 that are read as expected, of 307 and 171."""


class Found(NamedTuple):
    reasoning: str
    content: str
    calls: tuple[Call, ...]


@cache
def published() -> list[Case]:
    """Whole outputs: what is cut off has no one right reading."""
    read, unread = cases(_FOLDER)
    assert not unread
    return [case for case in read if not case.options.get("is_partial")]


@cache
def template_of(path: str) -> ChatTemplate:
    tokenizer = ascii_tokenizer((_FOLDER / path).read_text(encoding="utf8"))
    tokenizer.bos_token = "<s>"
    return ChatTemplate(tokenizer)


def tools_of(case: Case) -> list[dict[str, Any]]:
    tools = [tool if isinstance(tool, Tool) else Tool(*tool) for tool in case.options.get("tools", [])]
    return [tool.for_chat for tool in tools]


@cache
def prompt_end(path: str, thinks: bool, tools: str) -> str:
    """What a template writes at the end of a prompt."""
    question = {"role": "user", "content": "Hey there!"}
    variables = {"enable_thinking": thinks, "thinking": thinks}
    for given in (json.loads(tools) or None, None):
        try:
            return template_of(path).write(Conversation([question], given), variables)[-100:]
        except ChatTemplateError:
            continue
    return ""


def place_of(case: Case) -> At:
    """Where the case's prompt ends."""
    goes_on = case.options.get("continue_final_message")
    if goes_on is not None:
        return "within reasoning" if goes_on == "COMMON_CHAT_CONTINUATION_REASONING" else "answer"
    thinks = case.options.get("enable_thinking", True)
    end = prompt_end(case.template, thinks, json.dumps(tools_of(case)))
    return format_of(template_of(case.template).source).place_of(end)


def found_in(case: Case, pieces: list[str]) -> Found:
    """What the server's reader finds in a text that comes in pieces, after what the case's last message has."""
    form = format_of(template_of(case.template).source)
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools_of(case)}
    reader = OutputReader(form.reads(place_of(case), bool(tools)), tools)
    reasoning, content, calls = "", "", []
    if case.options.get("continue_final_message"):
        before = case.options["messages"][-1]
        reasoning, content = before.reasoning, before.content
    for part in [*(part for piece in pieces for part in reader.push(piece)), *reader.flush()]:
        match part.kind:
            case "reasoning":
                reasoning += part.text
            case "answer":
                content += part.text
            case "call":
                calls.append(Call(part.text, ""))
            case "arguments":
                calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.text)
    return Found(reasoning, content, tuple(calls))


def meaning(calls: tuple[Call, ...]) -> list[tuple[str, object]]:
    """Names and arguments, however their JSON is written."""
    return [(call.name, json.loads(call.arguments or "{}")) for call in calls]


@needs_archive
def test_published_calls_are_read() -> None:
    with_calls = [case for case in published() if case.expected.calls]
    right = [case for case in with_calls if meaning(found_in(case, [case.text]).calls) == meaning(case.expected.calls)]
    assert len(right) >= CALLS, f"{len(right)} of {len(with_calls)}"


@needs_archive
def test_published_reasoning_is_read() -> None:
    """But for the space around it."""
    thinking = [case for case in published() if case.expected.reasoning]
    right = [c for c in thinking if found_in(c, [c.text]).reasoning.strip() == c.expected.reasoning.strip()]
    assert len(right) >= REASONING, f"{len(right)} of {len(thinking)}"


@needs_archive
def test_a_text_cut_at_every_character_says_the_same() -> None:
    for case in published():
        whole, cut = found_in(case, [case.text]), found_in(case, list(case.text))
        assert cut == whole, f"{case.template}, line {case.line}"


def test_the_cases_are_read_from_their_source(tmp_path: Path) -> None:
    """Strings of both kinds, joined ones, named messages, lists of templates."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test-chat.cpp").write_text(
        r"""
const common_chat_msg message_call =
    simple_assist_msg("", "I'm\nthinking", "special", "{\"arg\": 1}", /* .id = */ "0");
static void test(const std::string & template_path) {
    auto tst = peg_tester(template_path, detailed_debug);
    tst.test("one \"two\"\n"  // a remark (
             "three").expect_content("one").run();
}
    for (const char * tmpl : { "a.jinja", "b.jinja", }) { test(tmpl); }
    auto tst2 = peg_tester("c.jinja");
    tst2.test(R"#({"x": ")"})#").tools({ tool }).is_partial(true).expect(message_call).run();
    tst2.test("two").expect_reasoning("r").expect_tool_calls({ { "f", R"({})", "id" }, { "g", "{" "}", {} } }).run();
    tst2.test(unknown(3)).run();
"""
    )
    read, unread = cases(tmp_path)
    assert [(case.template, case.text, case.expected) for case in read] == [
        ("a.jinja", 'one "two"\nthree', Expected("one")),
        ("b.jinja", 'one "two"\nthree', Expected("one")),
        ("c.jinja", '{"x": ")"}', Expected("", "I'm\nthinking", (Call("special", '{"arg": 1}'),))),
        ("c.jinja", "two", Expected("", "r", (Call("f", "{}"), Call("g", "{}")))),
    ]
    assert [case.options for case in read[2:]] == [{"tools": ["tool"], "is_partial": True}, {}]
    assert len(unread) == 1 and unread[0].endswith(": unknown")
