"""Calls in texts, however they are cut into pieces. Would catch a call that is shown as text, a text that is lost or
turned into a call, and arguments that are no JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest

from smoe.generation.request import End, EndReason, Piece, Request
from smoe.generation.sampling import Sampling
from smoe.server.choice import ChoiceText
from smoe.server.tool_calls import PARSERS, form_of

OFFERED = ["warmth", "time"]
CITY = {"city": "Oslo"}
CALL = '{"name": "warmth", "arguments": {"city": "Oslo"}}'
OTHER = '{"name": "time", "arguments": {}}'
LLAMA = CALL.replace("arguments", "parameters")
WARMTH, TIME = ("warmth", CITY), ("time", {})
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_WARMTH = '<|tool_call_begin|>functions.warmth:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
KIMI_TIME = "<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_KING = KIMI.format(KIMI_WARMTH.replace("warmth", "king"))
SEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
SEEK_WARMTH = '<｜tool▁call▁begin｜>warmth<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
SEEK_TIME = "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
R1_WARMTH = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>warmth\n```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>'
R1_TIME = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>"
TEXTS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "No call.", "No call.", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [WARMTH]),
    ("hermes", f"So:<tool_call>{CALL}\n</tool_call>\n<tool_call>{OTHER}</tool_call>\n", "So:", [WARMTH, TIME]),
    ("hermes", f"a\n<tool_call>{CALL}</tool_call> b <tool_call>{OTHER}</tool_call>\n c ", "a\n b \n c ",
     [WARMTH, TIME]),
    ("hermes", f"<tool_call>{CALL}", "", [WARMTH]),
    ("hermes", f"<tool_call>{CALL}<tool_call>{OTHER}", "", [WARMTH, TIME]),
    ("hermes", f"<tool_call>[{CALL}, {OTHER}]</tool_call>", "", [WARMTH, TIME]),
    ("hermes", f"<tool_call>{CALL}}}</tool_call>", "}</tool_call>", [WARMTH]),
    ("hermes", "<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", []),
    ("hermes", f"<tool_call>nonsense <tool_call>{CALL}</tool_call>!", "<tool_call>nonsense !", [WARMTH]),
    ("hermes", f'<tool_call>{{"name": <tool_call>{CALL}</tool_call>', '<tool_call>{"name": ', [WARMTH]),
    ("hermes", f'<tool_call>{{"name": "x<tool_call>{OTHER}', '<tool_call>{"name": "x', [TIME]),
    ("hermes", f"<tool_call>{CALL}</tool_call>\n\n<tool_call>no", "\n\n<tool_call>no", [WARMTH]),
    ("hermes", "a <tool_ca b <tool_call>{", "a <tool_ca b <tool_call>{", []),
    ("hermes", '<tool_call>{"name": "king", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "king", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "time", "arguments": 5}</tool_call>',
     '<tool_call>{"name": "time", "arguments": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "time", "arguments": {"x": NaN}}',
     '<tool_call>{"name": "time", "arguments": {"x": NaN}}', []),
    ("mistral", "No call.", "No call.", []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {OTHER}]", "", [WARMTH, TIME]),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {OTHER}] So.", " So.", [WARMTH, TIME]),
    ("mistral", 'So:[TOOL_CALLS]warmth[ARGS]{"city": "Oslo"}[TOOL_CALLS]time{}', "So:", [WARMTH, TIME]),
    ("mistral", '[TOOL_CALLS]warmth [CALL_ID]a1B[ARGS] {"city": "Oslo"} yes', " yes", [WARMTH]),
    ("mistral", "[TOOL_CALLS] nonsense", "[TOOL_CALLS] nonsense", []),
    ("mistral", "[TOOL_CALLS]king[ARGS]{}", "[TOOL_CALLS]king[ARGS]{}", []),
    ("mistral", "[TOOL_CALLS]time[ARGS][]", "[TOOL_CALLS]time[ARGS][]", []),
    ("llama", "No call, {but} braces.", "No call, {but} braces.", []),
    ("llama", LLAMA, "", [WARMTH]),
    ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [WARMTH, WARMTH]),
    ("llama", f"\n{LLAMA};\n{LLAMA} So.", " So.", [WARMTH, WARMTH]),
    ("llama", f"Let me see.<|python_tag|>{LLAMA}", "Let me see.", [WARMTH]),
    ("llama", f"The form is {LLAMA}", f"The form is {LLAMA}", []),
    ("llama", '{"not": "a call"}', '{"not": "a call"}', []),
    ("llama", '{"name": "Alice", "age": 7}', '{"name": "Alice", "age": 7}', []),
    ("llama", '{"name": "Alice", "parameters": {}}', '{"name": "Alice", "parameters": {}}', []),
    ("llama", ' {"name": "time", "age": 7} ', ' {"name": "time", "age": 7} ', []),
    ("llama", '{"name": "time"}', '{"name": "time"}', []),
    ("llama", "{nonsense", "{nonsense", []),
    ("llama", " \n", " \n", []),
    ("kimi", "So: " + KIMI.format(KIMI_WARMTH + KIMI_TIME) + " b", "So:  b", [WARMTH, TIME]),
    ("kimi", KIMI.format(f"\n{KIMI_WARMTH}\n"), "", [WARMTH]),
    ("kimi", KIMI_KING, KIMI_KING, []),
    ("kimi", "a <|tool_calls_section_b", "a <|tool_calls_section_b", []),
    ("kimi", KIMI.format(KIMI_WARMTH).partition("<|tool_call_end|>")[0], "", [WARMTH]),
    ("deepseek", "So:" + SEEK.format(SEEK_WARMTH + SEEK_TIME), "So:", [WARMTH, TIME]),
    ("deepseek", SEEK.format(SEEK_TIME + "\n" + SEEK_WARMTH) + " b", " b", [TIME, WARMTH]),
    ("deepseek", SEEK.format("nonsense"), SEEK.format("nonsense"), []),
    ("deepseek-r1", SEEK.format(R1_WARMTH + "\n" + R1_TIME), "", [WARMTH, TIME]),
]  # fmt: skip


def read(form: str, parts: Iterable[str]) -> tuple[str, list[tuple[str, Any]]]:
    """(the text, the name and the arguments of each call) of a text that comes in parts."""
    parser = PARSERS[form](OFFERED)
    pieces = [*map(parser.push, parts), parser.flush()]
    calls = [call for _, found in pieces for call in found]
    for call in calls:
        prefix = f"functions.{call.name}:" if form == "kimi" else "call_"
        assert len(call.id) == 9 if form == "mistral" else call.id.startswith(prefix)
    return "".join(shown for shown, _ in pieces), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), TEXTS, ids=range(len(TEXTS)))
def test_calls_are_found_wherever_a_text_is_cut(form: str, text: str, shown: str, calls: list[tuple[str, Any]]) -> None:
    step = max(5, len(text) ** 2 // 4000)  # no more cuts of a longer text
    cuts = [*combinations(range(len(text) + 1), 2)][::step]
    parted = [list(text), [text], *([text[:a], text[a:]] for a in range(len(text)))]
    for parts in [*parted, *([text[:a], text[a:b], text[b:]] for a, b in cuts)]:
        assert read(form, parts) == (shown, calls), parts


WRITTEN = {
    "hermes": "a <tool_call>\n{{\"name\": \"warmth\", \"arguments\": {}}}\n</tool_call> b",
    "mistral": "a [TOOL_CALLS][{{\"name\": \"warmth\", \"arguments\": {}}}] b",
    "llama": "a <|python_tag|>{{\"name\": \"warmth\", \"parameters\": {}}} b",
}  # fmt: skip
SECTIONED = {
    "kimi": f"a {KIMI} b".format(KIMI_WARMTH.replace(json.dumps(CITY), "{}")),
    "deepseek": f"a {SEEK} b".format(SEEK_WARMTH.replace(json.dumps(CITY), "{}")),
    "deepseek-r1": f"a {SEEK} b".format(R1_WARMTH.replace(json.dumps(CITY), "{}")),
}
ODD = [
    "<|tool_call_end|>",
    "<｜tool▁calls▁end｜>",
    "\n```",
    "</tool_call>",
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    '"}]',
    "\\",
    '\\"}',
    "; {",
    "\n\t",
    "é😀",
    "}}",
]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("form", [*WRITTEN, *SECTIONED])
def test_arguments_may_have_any_text(form: str, odd: str) -> None:
    for arguments in ({"text": odd}, {odd: [odd, {"in": f"a{odd}b"}]}):
        text = (WRITTEN | SECTIONED)[form].format(json.dumps(arguments))
        for parts in [[text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))]:
            assert read(form, parts) == ("a  b", [("warmth", arguments)])


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("written", ['""', '" "', "null", "{}", '"{}"'])
def test_empty_arguments_are_an_empty_object(form: str, written: str) -> None:
    assert read(form, WRITTEN[form].format(written)) == ("a  b", [("warmth", {})])


@pytest.mark.parametrize("form", WRITTEN)
def test_arguments_may_be_a_text_of_json_and_nothing_else(form: str) -> None:
    assert read(form, WRITTEN[form].format(json.dumps(json.dumps(CITY)))) == ("a  b", [WARMTH])
    assert read(form, WRITTEN[form].format('{"city": "a\nb"}')) == ("a  b", [("warmth", {"city": "a\nb"})])
    for other in ('"Oslo"', "[1]", "7", '"[1]"', "1e999", '{"city": 1e999}'):
        text = WRITTEN[form].format(other)
        assert read(form, text) == (text, [])


def test_a_call_without_arguments_has_none() -> None:
    assert read("hermes", '<tool_call>{"name": "time"}</tool_call>') == ("", [TIME])


def test_text_before_a_call_is_not_held_back() -> None:
    for form in PARSERS:
        assert PARSERS[form](OFFERED).push("Once upon a time") == ("Once upon a time", [])


def test_a_call_comes_as_soon_as_it_is_whole() -> None:
    for form, text in (("hermes", f"<tool_call>{CALL}"), ("mistral", f"[TOOL_CALLS][{CALL}]"), ("llama", LLAMA)):
        assert [call.name for call in PARSERS[form](OFFERED).push(text)[1]] == ["warmth"]


@pytest.mark.parametrize("form", list(PARSERS))
def test_the_first_call_is_the_last_where_one_alone_is_wanted(form: str) -> None:
    call, other = (LLAMA, LLAMA.replace("warmth", "time")) if form == "llama" else (CALL, OTHER)
    text = {
        "hermes": f"<tool_call>{call}</tool_call> a <tool_call>{other}</tool_call>",
        "mistral": f"[TOOL_CALLS][{call}, {other}] a",
        "llama": f"{call}; {other} a",
        "kimi": KIMI.format(KIMI_WARMTH + KIMI_TIME) + " a",
        "deepseek": SEEK.format(SEEK_WARMTH + SEEK_TIME) + " a",
        "deepseek-r1": SEEK.format(R1_WARMTH + R1_TIME) + " a",
    }[form]
    parser = PARSERS[form](OFFERED, is_single=True)
    found = [parser.push(character) for character in text]
    assert [call.name for _, calls in found for call in calls] == ["warmth"]
    assert "".join(shown for shown, _ in found) == "" and parser.flush() == ("", [])
    assert parser.is_full and not PARSERS[form](OFFERED).is_full


def test_a_call_keeps_the_model_s_own_id_where_its_template_needs_it() -> None:
    """Kimi K2's writes ids as they are; would catch a next turn in which calls have names of ours."""
    _, calls = PARSERS["kimi"](OFFERED).push(KIMI.format(KIMI_WARMTH + KIMI_TIME))
    assert [call.id for call in calls] == ["functions.warmth:0", "functions.time:1"]


def test_a_text_ends_with_its_first_call() -> None:
    request = Request([1], Sampling(max_new_tokens=1000), lambda what: None)
    choice = ChoiceText(request, PARSERS["hermes"](OFFERED, is_single=True))
    for character in f"a<tool_call>{CALL}":
        assert not request.has_enough
        choice.take(Piece(1, character, None))
    assert request.has_enough
    assert choice.take(Piece(1, "</tool_call>", None)).is_empty
    choice.take(End(EndReason.LENGTH, ""))
    assert (choice.text, len(choice.calls), choice.finish_reason) == ("a", 1, "tool_calls")


def test_forms_are_told_by_templates() -> None:
    assert form_of("{{ '<tool_call>' }}") == "hermes"
    assert form_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert form_of("<|python_tag|>") == "llama"
    assert form_of(KIMI.format(KIMI_TIME)) == "kimi"
    assert form_of(SEEK.format(SEEK_TIME)) == "deepseek"
    assert form_of(SEEK.format(R1_TIME)) == "deepseek-r1"
    assert form_of("<tool_call><function=x>") is None  # another one
    assert form_of("nothing of tools") is None
