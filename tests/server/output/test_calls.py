"""Calls in texts, however they are cut into pieces. Would catch a call that is shown as text, a text that is lost or
turned into a call, and arguments that are not what the model has written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

from smoe.generation.request import End, EndReason, Piece, Request
from smoe.generation.sampling_settings import Sampling
from smoe.server.choice import ChoiceText
from smoe.server.output.families import format_of
from smoe.server.output.output_reader import OutputReader, Part
from smoe.server.output.tool_calls_json import JsonCalls, NamedJson

PARAMETERS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "units": {"type": ["string", "null"]},
    "area": {"type": "object"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
OFFERED: dict[str, dict[str, Any]] = {"warmth": {"properties": PARAMETERS}, "time": {}, "a.b": {}}
TEMPLATES = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS][ARGS]",
    "mistral, older": "[TOOL_CALLS]",
    "llama": "<|python_tag|>",
    "kimi": "<|tool_calls_section_begin|>",
    "kimi-k3": "<|open|><|close|><|sep|>",
    "deepseek": "<｜tool▁sep｜>",
    "deepseek-r1": "<｜tool▁sep｜>```json",
    "deepseek-v3.2": "｜DSML｜function_calls",
    "deepseek-v4": "｜DSML｜",
    "minimax-m2": "<minimax:tool_call>",
    "minimax-m3": "]<]minimax[>[",
    "seed": "<seed:tool_call>",
    "qwen": "<function=<parameter=",
    "glm": "<arg_key>",
    "hy3": "<arg_key{}>:opensource",
    "functionary": "<function=</function>",
    "functionary-3.2": ">>>all",
    "minicpm": "<function name=<param name=",
    "gemma": "<|tool_call>",
    "cohere": "<|START_ACTION|>",
    "command-r": "Action:```json",
    "nemotron": "<TOOLCALL>",
    "hunyuan": "<tool_calls><tool_call>```json",
    "apriel": "<tool_calls>",
    "apertus": "<|tools_prefix|>",
    "gigachat": "<|function_call|>",
    "firefunction": "functools",
    "lfm": "<|tool_call_start|>",
    "llama-4": "<|python_start|>",
    "solar": "<|tool_call:begin|>",
    "granite": "<|tool_call|>",
    "gpt-oss": "<|channel|><|message|><|start|>",
    "muse": "<atem:function_calls><|message|>",
}
"""What each format's chat templates have."""
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
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "warmth"}</tool_call>', "", [WARMTH]),
    ("hermes", '<tool_call>{"id": "7", "name": "time", "arguments": {}, "x": "y"}</tool_call> b', " b", [TIME]),
    ("hermes", f'<tool_call>{{"function": {OTHER}}}</tool_call>', "", [TIME]),
    ("mistral", "No call.", "No call.", []),
    ("mistral, older", f"[TOOL_CALLS] [{CALL}, {OTHER}]", "", [WARMTH, TIME]),
    ("mistral, older", f"[TOOL_CALLS] [{CALL}, {OTHER}] So.", " So.", [WARMTH, TIME]),
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
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="warmth">\n<parameter name="city">Oslo</parameter>\n</invoke>\n'
     '<invoke name="time">\n</invoke>\n</minimax:tool_call> b', " b", [WARMTH, TIME]),
    ("qwen", "a <tool_call>\n<function=warmth>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3"
     "\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>", "a ",
     [("warmth", {"city": "Oslo", "days": 3}), TIME]),
    ("qwen", "<function=warmth><parameter=city>\n\nOs\"lo\n\n</parameter>\n<parameter=units>null</parameter>"
     "</function> b", " b", [("warmth", {"city": '\nOs"lo\n', "units": None})]),
    ("qwen", "<function=king></function>", "<function=king></function>", []),
    ("glm", "<tool_call>warmth\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>area</arg_key>\n"
     '<arg_value>{"a": [1]}</arg_value>\n</tool_call><tool_call>time</tool_call>', "",
     [("warmth", {**CITY, "area": {"a": [1]}}), TIME]),
    ("gpt-oss", "<|channel|>final<|message|>A <b>.", "A <b>.", []),
    ("gpt-oss", "<|channel|>commentary<|message|>So:<|end|><|start|>assistant to=functions.warmth<|channel|>commentary"
     f" json<|message|>{json.dumps(CITY)}<|call|>", "So:", [WARMTH]),
    ("gpt-oss", "A text without channels.", "A text without channels.", []),
    ("gpt-oss", "<|channel|>commentary to=functions.king<|message|>{}", "", []),
    ("lfm", "So: <|tool_call_start|>[warmth(city='Oslo'), time()]<|tool_call_end|> b", "So:  b", [WARMTH, TIME]),
    ("lfm", "<|tool_call_start|>[a.b(x=[1, (2,)], y={'a': None, \"b\": true}, z='[\\'(')]", "",
     [("a.b", {"x": [1, [2]], "y": {"a": None, "b": True}, "z": "['("})]),
    ("lfm", "<|tool_call_start|>[warmth('Oslo')]", "<|tool_call_start|>[warmth('Oslo')]", []),
    ("lfm", "[time()]", "[time()]", []),
    ("llama-4", '[warmth(city="Oslo"), time()]', "", [WARMTH, TIME]),
    ("llama-4", "[a link](there)", "[a link](there)", []),
    ("gemma", '<|tool_call>call:warmth{city:<|"|>Os}l{o<|"|>,tags:[<|"|>a<|"|>,<|"|>b<|"|>],area:{x:{},y:-1.5e2}}'
     "<tool_call|><|tool_call>call:time{}<tool_call|>", "",
     [("warmth", {"city": "Os}l{o", "tags": ["a", "b"], "area": {"x": {}, "y": -150.0}}), TIME]),
    ("solar", '<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>warmth<|tool_call:args|>{"city": "Oslo"}'
     "<|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>time<|tool_call:args|>{}<|tool_call:end|>", "",
     [WARMTH, TIME]),
    ("hunyuan",
     '<tool_calls>\n<tool_call>warmth\n```json\n{"city": "Oslo"}\n```</tool_call>\n<tool_call>time\n```json\n'
     "{}\n```</tool_call>\n</tool_calls>", "", [WARMTH, TIME]),
    ("hy3", "<tool_calls:opensource>\n<tool_call:opensource>warmth<tool_sep:opensource>\n<arg_key:opensource>city"
     "</arg_key:opensource>\n<arg_value:opensource>Oslo</arg_value:opensource>\n</tool_call:opensource>\n"
     "</tool_calls:opensource>", "", [WARMTH]),
    ("granite", f"<|tool_call|>[{CALL}, {OTHER}]", "", [WARMTH, TIME]),
    ("apriel", f"<tool_calls>\n{CALL}\n{OTHER}\n</tool_calls>", "", [WARMTH, TIME]),
    ("functionary-3.2", 'all\nSo:>>>warmth\n{"city": "Oslo"}>>>time\n{}', "So:", [WARMTH, TIME]),
    ("functionary-3.2", 'time\n{}', "", [TIME]),
    ("deepseek-r1", SEEK.format(R1_WARMTH + "\n" + R1_TIME), "", [WARMTH, TIME]),
]  # fmt: skip


def reader_of(form: str, is_single: bool = False, **more: Any) -> OutputReader:
    return OutputReader(format_of(TEMPLATES[form]).reads("beginning", True), OFFERED, is_single=is_single, **more)


def joined(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str]]]:
    """(the text, the name and the arguments of each call) of parts."""
    text, calls = "", list[tuple[str, str]]()
    for part in parts:
        if part.kind == "call":
            calls.append((part.text, ""))
        elif part.kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
        else:
            text += part.text
    return text, calls


def read(form: str, parts: Iterable[str]) -> tuple[str, list[tuple[str, Any]]]:
    """(the text, the name and the arguments of each call) of a text that comes in parts."""
    reader = reader_of(form)
    text, calls = joined([*(part for piece in parts for part in reader.push(piece)), *reader.flush()])
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("form", "text", "shown", "calls"), TEXTS, ids=range(len(TEXTS)))
def test_calls_are_found_wherever_a_text_is_cut(form: str, text: str, shown: str, calls: list[tuple[str, Any]]) -> None:
    step = max(5, len(text) ** 2 // 2000)  # no more cuts of a longer text
    cuts = [*combinations(range(len(text) + 1), 2)][::step]
    parted = [list(text), [text], *([text[:a], text[a:]] for a in range(len(text)))]
    for parts in [*parted, *([text[:a], text[a:b], text[b:]] for a, b in cuts)]:
        assert read(form, parts) == (shown, calls), parts


WRITTEN = {
    "hermes": "a <tool_call>\n{{\"name\": \"warmth\", \"arguments\": {}}}\n</tool_call> b",
    "mistral, older": "a [TOOL_CALLS][{{\"name\": \"warmth\", \"arguments\": {}}}] b",
    "llama": "a <|python_tag|>{{\"name\": \"warmth\", \"parameters\": {}}} b",
}  # fmt: skip
SECTIONED = {
    "mistral": "a [TOOL_CALLS]warmth[ARGS]{} b",
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
    for other in ('"Oslo"', "[1]", "7", '"[1]"', "1e999"):
        text = WRITTEN[form].format(other)
        assert read(form, text) == (text, [])


def test_a_call_without_arguments_has_none() -> None:
    assert read("hermes", '<tool_call>{"name": "time"}</tool_call>') == ("", [TIME])


@pytest.mark.parametrize("form", list(TEMPLATES))
def test_text_before_a_call_is_not_held_back(form: str) -> None:
    assert reader_of(form).push("Once upon a time") == [Part("answer", "Once upon a time")]


@pytest.mark.parametrize(
    ("form", "text", "more"),
    [
        ("hermes", '<tool_call>{"name": "warmth", "arguments": {"city": "Os', ["l", 'o"', ', "da']),
        ("kimi", '<|tool_call_begin|>functions.warmth:0<|tool_call_argument_begin|>{"city": "Os', ["l", 'o"', "}"]),
        ("qwen", "<tool_call><function=warmth><parameter=city>\nOs", ["l", 'o"', "\\"]),
        ("minimax-m2", '<invoke name="warmth"><parameter name="city">Os', ["l", "o", "\n"]),
        ("gpt-oss", '<|channel|>commentary to=functions.warmth<|message|>{"city": "Os', ["l", 'o"', "}"]),
    ],
)
def test_arguments_come_as_they_are_written(form: str, text: str, more: list[str]) -> None:
    reader = reader_of(form)
    assert joined(reader.push(text)) == ("", [("warmth", '{"city": "Os')])
    for piece in more:
        (part,) = reader.push(piece)
        expected = json.dumps(piece)[1:-1] if form in ("qwen", "minimax-m2") else piece
        assert (part.kind, part.text) == ("arguments", expected)


@pytest.mark.parametrize("form", ["hermes", "kimi", "qwen"])
def test_a_call_that_is_cut_off_is_a_call(form: str) -> None:
    """Would catch a forced call that reaches a client as text where there was no room for all of it."""
    text = {
        "hermes": '<tool_call>{"name": "warmth", "arguments": {"city": "Os',
        "kimi": '<|tool_call_begin|>functions.warmth:0<|tool_call_argument_begin|>{"city": "Os',
        "qwen": "<tool_call>\n<function=warmth>\n<parameter=city>\nOs",
    }[form]
    reader = reader_of(form)
    assert joined([*reader.push(text), *reader.flush()]) == ("", [("warmth", '{"city": "Os')])


def test_special_tokens_are_never_shown() -> None:
    """Neither those of what is no call, nor those that belong nowhere."""
    for text, shown in (("<tool_call>nonsense</tool_call>!", "nonsense!"), ("a</tool_call>b<tool_call>", "ab")):
        for parts in ([text], list(text)):
            reader = reader_of("hermes", hidden=("<tool_call>", "</tool_call>"))
            assert joined([*(part for piece in parts for part in reader.push(piece)), *reader.flush()]) == (shown, [])


SEVERAL = {
    "hermes": f"<tool_call>{CALL}</tool_call> a <tool_call>{OTHER}</tool_call>",
    "mistral, older": f"[TOOL_CALLS][{CALL}, {OTHER}] a",
    "mistral": '[TOOL_CALLS]warmth[ARGS]{"city": "Oslo"}[TOOL_CALLS]time[ARGS]{} a',
    "llama": f"{LLAMA}; {LLAMA.replace('warmth', 'time')} a",
    "kimi": KIMI.format(KIMI_WARMTH + KIMI_TIME) + " a",
    "deepseek": SEEK.format(SEEK_WARMTH + SEEK_TIME) + " a",
    "deepseek-r1": SEEK.format(R1_WARMTH + R1_TIME) + " a",
    "qwen": "<function=warmth><parameter=city>Oslo</parameter></function> <function=time></function> a",
    "lfm": "<|tool_call_start|>[warmth(city='Oslo'), time()]<|tool_call_end|> a",
    "gemma": '<|tool_call>call:warmth{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:time{}<tool_call|> a',
    "gpt-oss": '<|channel|>commentary to=functions.warmth<|message|>{"city": "Oslo"}<|call|><|start|>assistant',
}


@pytest.mark.parametrize("form", SEVERAL)
def test_the_first_call_is_the_last_where_one_alone_is_wanted(form: str) -> None:
    reader = reader_of(form, is_single=True)
    found = [part for character in SEVERAL[form] for part in reader.push(character)]
    assert joined(found) == ("", [("warmth", json.dumps(CITY))])
    assert reader.is_full and reader.flush() == [] and not reader_of(form).is_full


def test_a_call_keeps_the_model_s_own_id_where_its_template_needs_it() -> None:
    """Kimi K2's writes ids as they are; would catch a next turn in which calls have names of ours."""
    parts = reader_of("kimi").push(KIMI.format(KIMI_WARMTH + KIMI_TIME))
    assert [part.id for part in parts if part.kind == "call"] == ["functions.warmth:0", "functions.time:1"]


def test_a_text_ends_with_its_first_call() -> None:
    request = Request([1], Sampling(max_new_tokens=1000), lambda what: None)
    choice = ChoiceText(request, reader_of("hermes", is_single=True))
    for character in f"a<tool_call>{CALL}"[:-1]:
        assert not request.has_enough
        choice.take(Piece(1, character, None))
    assert request.has_enough
    assert choice.take(Piece(1, "}</tool_call>", None)).is_empty
    choice.take(End(EndReason.LENGTH, ""))
    assert (choice.text, len(choice.calls), choice.finish_reason) == ("a", 1, "tool_calls")


def test_templates_show_the_format() -> None:
    assert isinstance(format_of("{{ '<tool_call>' }}").calls, JsonCalls)
    assert isinstance(format_of(KIMI.format(KIMI_TIME)).calls, NamedJson)
    assert format_of("nothing of tools").calls is None
