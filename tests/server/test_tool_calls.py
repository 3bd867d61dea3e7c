"""Calls in texts, however they are cut into pieces. Would catch a call that is shown as text, a text that is lost."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from smoe.server.tool_calls import PARSERS, form_of

CALL = '{"name": "warmth", "arguments": {"city": "Oslo"}}'
OTHER = '{"name": "time", "arguments": {}}'
LLAMA = CALL.replace("arguments", "parameters")
TEXTS: list[tuple[str, str, str, list[str]]] = [
    ("hermes", "No call.", "No call.", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", ["warmth"]),
    ("hermes", f"So:<tool_call>{CALL}\n</tool_call>\n<tool_call>{OTHER}</tool_call>\n", "So:", ["warmth", "time"]),
    ("hermes", f"<tool_call>{CALL}", "", ["warmth"]),
    ("hermes", "<tool_call>nonsense</tool_call>!", "<tool_call>nonsense</tool_call>!", []),
    ("hermes", "a <tool_ca b <tool_call>{", "a <tool_ca b <tool_call>{", []),
    ("mistral", "No call.", "No call.", []),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {OTHER}]", "", ["warmth", "time"]),
    ("mistral", 'So:[TOOL_CALLS]warmth[ARGS]{"city": "Oslo"}[TOOL_CALLS]time{}', "So:", ["warmth", "time"]),
    ("mistral", "[TOOL_CALLS] nonsense", "[TOOL_CALLS] nonsense", []),
    ("llama", "No call, {but} braces.", "No call, {but} braces.", []),
    ("llama", LLAMA, "", ["warmth"]),
    ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", ["warmth", "warmth"]),
    ("llama", '{"not": "a call"}', '{"not": "a call"}', []),
    ("llama", "{nonsense", "{nonsense", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "shown", "names"), TEXTS, ids=range(len(TEXTS)))
def test_calls_are_found_wherever_a_text_is_cut(form: str, text: str, shown: str, names: list[str]) -> None:
    cuts = [(a, b) for a, b in combinations(range(len(text) + 1), 2) if (a + b) % 5 == 0] + [(0, len(text))]
    for a, b in cuts:
        parser, said, calls = PARSERS[form](), "", []
        for part in (text[:a], text[a:b], text[b:]):
            more, found = parser.push(part)
            said, calls = said + more, calls + found
        rest, found = parser.flush()
        calls += found
        assert (said + rest, [call.name for call in calls]) == (shown, names), (text[:a], text[a:b], text[b:])
        for call in calls:
            assert json.loads(call.arguments) == ({"city": "Oslo"} if call.name == "warmth" else {})
            assert len(call.id) == 9 if form == "mistral" else call.id.startswith("call_")


def test_text_before_a_call_is_not_held_back() -> None:
    for form in PARSERS:
        assert PARSERS[form]().push("Once upon a time") == ("Once upon a time", [])


def test_forms_are_told_by_templates() -> None:
    assert form_of("{{ '<tool_call>' }}") == "hermes"
    assert form_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert form_of("<|python_tag|>") == "llama"
    assert form_of("<tool_call><function=x>") is None  # another one
    assert form_of("nothing of tools") is None
