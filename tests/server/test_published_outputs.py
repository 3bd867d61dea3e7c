"""How much of what llama.cpp's chat tests publish is read as they read it: calls, reasoning, and cut anywhere.

SMOE_LLAMA_CPP names a source tree of llama.cpp; without it only the reader of its tests is tested. The counts below are
what is read today: they may only rise.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from smoe.server.thinking import BEGIN, END, Thinking, may_think
from smoe.server.tool_calls import PARSERS, Parser, PlainText, form_of
from tests.server.published_outputs import Call, Case, Expected, cases

_FOLDER = Path(os.environ.get("SMOE_LLAMA_CPP", "/nonexistent"))
needs_archive = pytest.mark.skipif(
    not (_FOLDER / "tests" / "test-chat.cpp").exists(), reason="SMOE_LLAMA_CPP names no source tree of llama.cpp"
)
CALLS, REASONING = 42, 67
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


def found_in(case: Case, pieces: list[str]) -> Found:
    """What the server's readers find in a text that comes in pieces."""
    template = (_FOLDER / case.template).read_text(encoding="utf8")
    text = "".join(pieces)
    thinking = Thinking(is_begun=END in text and BEGIN not in text) if may_think(template) else None
    form = form_of(template)
    parser: Parser = PlainText() if form is None else PARSERS[form]({call.name for call in case.expected.calls})
    reasoning, content, calls = "", "", []
    for piece in [*pieces, None]:
        thought, said = "", piece or ""
        if thinking is not None:
            thought, said = thinking.flush() if piece is None else thinking.push(piece)
        shown, more = parser.push(said)
        reasoning, content, calls = reasoning + thought, content + shown, [*calls, *more]
    shown, more = parser.flush()
    return Found(reasoning, content + shown, tuple(Call(call.name, call.arguments) for call in [*calls, *more]))


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
