"""Reasoning and answers, however a text is cut into pieces. Would catch reasoning that is shown as the answer, an
answer that is taken for reasoning, and a text that is lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest

from smoe.server.output.families import format_of
from smoe.server.output.output_format import At
from smoe.server.output.output_reader import OutputReader

THINK, GEMMA, OSS = "<think></think>", "<|channel><|tool_call>", "<|channel|><|message|><|start|>"
COHERE = "<|START_THINKING|><|START_RESPONSE|><|START_ACTION|>"
HERMES = "<think></think><tool_call>"
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
TEXTS: list[tuple[str, At, str, str, str, int]] = [
    (THINK, "beginning", "Yes.", "", "Yes.", 0),
    (THINK, "beginning", " Yes.", "", " Yes.", 0),
    (THINK, "beginning", "<think>\nI see.\n</think>\n\nYes. </think>", "I see.", "Yes. </think>", 0),
    (THINK, "beginning", "\n<think> a < b </thin </think> <think>", "a < b </thin", "<think>", 0),
    (THINK, "beginning", "<think>cut off </thi", "cut off </thi", "", 0),
    (THINK, "beginning", "<think>\n\n</think>\n\nYes.", "", "Yes.", 0),
    (THINK, "beginning", "<thin", "", "<thin", 0),
    (THINK, "beginning", "So: <think>x</think>", "", "So: <think>x</think>", 0),
    (THINK, "beginning", "</think>Yes.", "", "Yes.", 0),
    (THINK, "beginning", "", "", "", 0),
    (THINK, "reasoning", "\nI see.\n</think>\nYes.\n", "I see.", "Yes.\n", 0),
    (THINK, "reasoning", "cut off ", "cut off", "", 0),
    (THINK, "within reasoning", " see.</think>Yes.", " see.", "Yes.", 0),
    (THINK, "answer", "<think>x</think>", "", "<think>x</think>", 0),
    (HERMES, "reasoning", f"I see.\n{CALL}", "I see.", "", 1),
    (HERMES, "reasoning", f"I write {CALL} \n</think>\n{CALL}", f"I write {CALL}", "", 1),
    (HERMES, "beginning", f"<think>I see.</think>So: {CALL}", "I see.", "So: ", 1),
    (HERMES, "reasoning", "I write <tool_call> now ", "I write <tool_call> now", "", 0),
    (GEMMA, "beginning", "<|channel>thought\nI see.\n<channel|>Yes.", "I see.", "Yes.", 0),
    (GEMMA, "beginning", "a<|channel>thought\nb<channel|>c<channel|>", "b", "ac", 0),
    (COHERE, "beginning", "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "a", "b", 0),
    (OSS, "beginning", "<|channel|>analysis<|message|>a <|end|><|start|>assistant<|channel|>final<|message|>b", "a",
     "b", 0),
    (OSS, "beginning", '<|channel|>analysis to=functions.now<|message|>{}<|call|>', "", "", 1),
    (OSS, "beginning", "<|channel|>analysis<|message|>cut o", "cut o", "", 0),
    (OSS, "answer", "b<|end|>", "", "b", 0),
    ("[THINK]", "beginning", "[THINK]a[/THINK]b", "a", "b", 0),
    ("<seed:think>", "beginning", "<seed:think>a</seed:think>\nb", "a", "b", 0),
    ("<mm:think>", "beginning", "<mm:think>a</mm:think>b", "a", "b", 0),
    ("<|begin|><|think|><|content|>", "beginning", "<|think|>a<|end|><|begin|>assistant<|content|>b<|end|>", "a", "b",
     0),
]  # fmt: skip


def read(template: str, at: At, pieces: Sequence[str]) -> tuple[str, str, int]:
    """(reasoning, answer, number of calls) of a text that comes in pieces."""
    reader = OutputReader(format_of(template).reads(at, True), {"now": {}})
    found, calls = {"reasoning": "", "answer": "", "arguments": ""}, 0
    for part in [*(part for piece in pieces for part in reader.push(piece)), *reader.flush()]:
        if part.kind == "call":
            calls += 1
        else:
            found[part.kind] += part.text
    assert found["arguments"] == "{}" * calls
    return found["reasoning"], found["answer"], calls


@pytest.mark.parametrize(("template", "at", "text", "reasoning", "answer", "calls"), TEXTS, ids=range(len(TEXTS)))
def test_reasoning_is_read_wherever_a_text_is_cut(
    template: str, at: At, text: str, reasoning: str, answer: str, calls: int
) -> None:
    cuts = [*combinations(range(len(text) + 2), 2)][:: max(1, len(text) ** 2 // 800)]
    for pieces in [list(text), *([text[:a], text[a:b], text[b:]] for a, b in cuts)]:
        assert read(template, at, pieces) == (reasoning, answer, calls), pieces


def test_neither_part_is_held_back() -> None:
    reader = OutputReader(format_of(THINK).reads("beginning", False))
    assert [part.text for part in reader.push("<think>I see")] == ["I see"] and reader.is_reasoning
    assert [(part.kind, part.text) for part in reader.push(" you.</think>Yes")] == [
        ("reasoning", " you."),
        ("answer", "Yes"),
    ]
    assert not reader.is_reasoning


def test_prompts_show_where_they_end() -> None:
    form = format_of(THINK)
    assert form.place_of("assistant\n<think>\n") == "reasoning" and form.place_of("<think></think>\n") == "beginning"
    assert form.place_within("a") == "answer" and form.place_within("<think>a") == "within reasoning"
    assert form.place_within("<think>a</think>b") == "answer" and not format_of("nothing").reasons
