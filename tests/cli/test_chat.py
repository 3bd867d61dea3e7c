from __future__ import annotations

import io
import json
import sys

import pytest
import torch

from tests.toy import TEMPLATE, save_toy


@pytest.fixture
def say(run, monkeypatch):
    def say(model, *lines, more=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", model, "--memory", "64MiB", "--max-new-tokens", 8, *more)

    return say


@pytest.mark.parametrize("leave", ["/quit", "/exit", "/bye"])
def test_without_a_template_the_text_goes_on(say, checkpoint, leave):
    ran = say(checkpoint, "One", "Two", leave, "never read")
    assert ran.code == 0 and "continues your text" in ran.err
    assert "0 of 3 tokens were in the KV cache" in ran.err and "10 of 15 tokens were in the KV cache" in ran.err


def test_with_a_template_only_the_new_turn_is_computed(say, tmp_path):
    model = save_toy(tmp_path / "model", template=TEMPLATE)
    ran = say(model, "Hi", "And now?")
    assert ran.code == 0 and "continues your text" not in ran.err
    known = [int(line.split(", ")[-1].split()[0]) for line in ran.err.splitlines() if "were in the KV cache" in line]
    first = len("user: Hi\nassistant:")
    assert known[0] == 0 and known[1] >= first


def test_a_template_of_the_user_replaces_the_models(say, checkpoint, tmp_path):
    """The checkpoint has none."""
    path = tmp_path / "own.jinja"
    path.write_text(TEMPLATE)
    ran = say(checkpoint, "Hi", "/quit", more=("--chat-template", path))
    assert ran.code == 0 and "continues your text" not in ran.err
    assert f"0 of {len('user: Hi') + 1 + len('assistant:')} tokens were in the KV cache" in ran.err
    ran = say(checkpoint, "Hi", more=("--chat-template", tmp_path))
    assert ran.code == 2 and f"{tmp_path} (--chat-template) cannot be read: Is a directory" in ran.err


def test_the_demo_is_called_a_toy(say, checkpoint):
    """Would catch a stranger who takes the demo's children's stories for answers."""
    assert "writes children's stories" in " ".join(say("demo", "/quit").err.split())
    assert "children's stories" not in say(checkpoint, "/quit").err


def test_reset_forgets(say, checkpoint):
    ran = say(checkpoint, "One", "/reset", "One", "/quit")
    first, second = ran.out.splitlines()[0], ran.out.splitlines()[-1]
    assert ran.err.count("0 of 3 tokens were in the KV cache") == 2 and "the conversation is deleted" in ran.err
    assert first == second


def test_an_unknown_command_is_not_for_the_model(say, checkpoint):
    ran = say(checkpoint, "/hlep", "One", "/quit")
    assert "the command /hlep is unknown; /help lists" in ran.err and "0 of 3 tokens were in the KV cache" in ran.err


def test_commands_are_listed_at_the_start_and_by_help(say, checkpoint):
    first = say(checkpoint, "/quit").err
    again = say(checkpoint, "/help", "/quit").err
    for word in ("/help", "/settings", "/reset", "/quit", "Ctrl-C"):
        assert first.count(word) >= 1 and again.count(word) > first.count(word)


@pytest.fixture
def sampled(tmp_path):
    """A toy that wants to be sampled from."""
    folder = save_toy(tmp_path / "sampled")
    own = {"do_sample": True, "temperature": 1.7, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.2, "min_p": 0.01}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return folder


def test_settings_are_the_models_unless_given(say, sampled):
    said = " ".join(say(sampled, "/settings", "/quit", more=("--top-k", 7, "--seed", 5)).err.split())
    for words in ("temperature 1.7 (the model's)", "top_p 0.9 (the model's)", "top_k 7 (given)", "seed 5 (given)"):
        assert words in said
    for words in ("repetition_penalty 1.2 (the model's)", "min_p 0.01 (the model's)", "0 of 256 tokens"):
        assert words in said
    greedy = " ".join(say(sampled, "/settings", "/quit", more=("--temperature", 0)).err.split())
    assert "always the most likely token" in greedy and "temperature 1.7" not in greedy


def test_a_conversation_is_that_of_transformers(say, sampled):
    """The same draws as the library's own loop with the model's own generation config."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    answers = say(sampled, "Hello", "/quit", more=("--seed", 11)).out
    model = AutoModelForCausalLM.from_pretrained(sampled, dtype="auto", experts_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(sampled)
    ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
    torch.manual_seed(11)
    theirs = model.generate(ids, max_new_tokens=8)[0, ids.shape[1] :]
    assert answers == tokenizer.decode(theirs, skip_special_tokens=True) + "\n"


def test_a_seed_repeats_a_conversation(say, sampled):
    talk = ("Hello", "/reset", "Hello", "/quit")
    first, again, other = (say(sampled, *talk, more=("--seed", seed)).out for seed in (3, 3, 4))
    assert first == again != other
    one, two = first.splitlines()
    assert one != two, "asked again, the model may answer otherwise"
    assert say(sampled, *talk).out != say(sampled, *talk).out


def test_options_are_checked(run, checkpoint):
    for option, value in (("--top-k", -1), ("--repetition-penalty", 0), ("--temperature", -1), ("--top-p", 2)):
        ran = run("chat", checkpoint, "--memory", "64MiB", option, value)
        assert ran.code == 2 and option in ran.err and "Traceback" not in ran.err


def test_a_closed_stdin_is_one_message(run, checkpoint, monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stdin in (None, closed):
        monkeypatch.setattr(sys, "stdin", stdin)
        ran = run("chat", checkpoint, "--memory", "64MiB")
        assert ran.code == 2 and "stdin is closed" in ran.err and "budget" not in ran.err


def test_a_full_context_is_said_and_survived(say, checkpoint):
    ran = say(checkpoint, "x" * 40, "/reset", "One", more=("--context", 32))
    assert ran.code == 0 and "the prompt has 40 tokens" in ran.err and "starts a new conversation" in ran.err
    assert "0 of 3 tokens were in the KV cache" in ran.err


def test_ctrl_c_stops_the_answer_not_the_program(say, checkpoint, monkeypatch):
    from smoe.cli import chat

    shown = []

    def write(row, text):
        shown.append(text)
        if len(shown) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_write", write)
    ran = say(checkpoint, "One", "Two", "/quit")
    assert ran.code == 0 and ran.err.count("stopped, ") == 1 and ran.err.count("were in the KV cache") == 2
