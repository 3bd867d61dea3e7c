from __future__ import annotations

import io
import sys

import pytest

from tests.toy import TEMPLATE, save_toy


@pytest.fixture
def say(run, monkeypatch):
    def say(model, *lines, more=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", model, "--memory", "64MiB", "--max-new-tokens", 8, *more)

    return say


def test_without_a_template_the_text_goes_on(say, checkpoint):
    ran = say(checkpoint, "One", "Two", "/quit", "never read")
    assert ran.code == 0 and "continues the text" in ran.err
    assert "0 of 3 tokens were known" in ran.err and "10 of 15 tokens were known" in ran.err


def test_with_a_template_only_the_new_turn_is_computed(say, tmp_path):
    model = save_toy(tmp_path / "model", template=TEMPLATE)
    ran = say(model, "Hi", "And now?")
    assert ran.code == 0 and "continues the text" not in ran.err
    known = [int(line.split(", ")[-1].split()[0]) for line in ran.err.splitlines() if "were known" in line]
    first = len("user: Hi\nassistant:")
    assert known[0] == 0 and known[1] >= first


def test_reset_forgets(say, checkpoint):
    ran = say(checkpoint, "One", "/reset", "One", "/quit")
    first, second = ran.out.splitlines()[0], ran.out.splitlines()[-1]
    assert ran.err.count("0 of 3 tokens were known") == 2 and "forgotten" in ran.err
    assert first == second


def test_an_unknown_command_is_not_for_the_model(say, checkpoint):
    ran = say(checkpoint, "/help", "One", "/quit")
    assert "there is no /help; /reset forgets the conversation" in ran.err and "0 of 3 tokens were known" in ran.err


def test_a_full_context_is_said_and_survived(say, checkpoint):
    ran = say(checkpoint, "x" * 40, "/reset", "One", more=("--context", 32))
    assert ran.code == 0 and "the prompt has 40 tokens" in ran.err and "makes room" in ran.err
    assert "0 of 3 tokens were known" in ran.err


def test_ctrl_c_stops_the_answer_not_the_program(say, checkpoint, monkeypatch):
    from smoe.cli import chat

    shown = []

    def write(row, text):
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_write", write)
    ran = say(checkpoint, "One", "Two", "/quit")
    assert ran.code == 0 and ran.err.count("stopped, ") == 1 and ran.err.count("were known") == 2
