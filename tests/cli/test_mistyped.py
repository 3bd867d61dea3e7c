"""Command lines that the parser refuses, and a reader that ends early. Would catch an error in another style, a flag
that seems to take a value, and an exit code that means something else."""

from __future__ import annotations

import os
import sys

import pytest

from smoe.cli import command_line
from smoe.cli.programs import PROGRAMS
from tests.forked import Forked


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            "generate -n 60",
            "the option -n is unknown (did you mean --max-new-tokens?); smoe generate --help lists the options",
        ),
        ("plan -n 60", "the option -n is unknown; smoe plan --help lists the options"),
        ("chat --temprature 1", "the option --temprature is unknown (did you mean --temperature?); smoe chat --help"),
        ("generate --temperature hot", "--temperature is 'hot'; it must be a number; smoe generate --help"),
        ("serve --port x", "--port is 'x'; it must be a whole number; smoe serve --help lists the options"),
        ("serve --port", "--port needs a value"),
        ("pack", "MODEL is missing; smoe pack --help lists the options"),
        (
            "plan demo 8GiB",
            "unexpected argument '8GiB'; to give it as the memory budget: --memory 8GiB; smoe plan --help",
        ),
        (
            "plan demo --memory 8 GiB",
            "unexpected argument 'GiB'; a size has no space before its unit, such as 8GiB; smoe plan --help",
        ),
        ("chat demo other", "unexpected argument 'other'; smoe chat --help lists the options"),
        (
            "generate --tokens 60",
            "the option --tokens is unknown (did you mean --max-new-tokens?); smoe generate --help",
        ),
        (
            "chat -p Hi",
            "the option -p is unknown; a prompt is an option of smoe generate: smoe generate -p Hi; smoe chat",
        ),
        (
            "--memory 5GiB",
            "the option --memory is unknown before a command; give it after one: smoe generate --memory 5GiB; smoe",
        ),
        ("--modl x", "the option --modl is unknown; smoe --help lists the commands"),
        ("generate demo Tom", "unexpected argument 'Tom'; to give it as a prompt: -p Tom; smoe generate --help"),
        ("nothing", "no such command 'nothing'; smoe --help lists the commands"),
        ("launch", "smoe launch needs a program to start: " + ", ".join(PROGRAMS)),
    ],
)
def test_a_refused_line_is_one_error_in_the_style_of_the_others(run, line, error):
    ran = run(*line.split())
    assert ran.code == 2 and ran.err.startswith(f"error: {error}") and ran.err.count("\n") == 1


def test_programs_get_the_same_words(run):
    found = run("generate", "--temperature", "hot", "--json").json["error"]
    assert found["message"].startswith("--temperature is 'hot'; it must be a number")
    assert (found["setting"], found["given"], found["allowed"]) == ("temperature", "hot", "a number")


def test_flags_show_no_type_of_a_value(run):
    for words in (["generate"], ["chat"], ["cluster", "join"], ["trace", "plot"], []):
        for name in ("--help", "-h"):
            shown = run(*words, name)
            assert shown.code == 0 and "--help" in shown.out and "<bool>" not in shown.out, words


def test_a_command_without_arguments_shows_its_help(run):
    for words in ([], ["trace"], ["cluster"]):
        shown = run(*words)
        assert "Usage: smoe" in shown.out and shown.err == "", words
    assert command_line().commands.keys() >= {"generate", "launch"}


@pytest.mark.skipif(os.name == "nt", reason="POSIX: pipes")
@pytest.mark.parametrize("line", ["plan demo --memory 20MiB -q", "plan --help"])
def test_a_reader_that_has_ended_ends_the_command_quietly(line, tmp_path):
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with (tmp_path / "errors").open("wb") as errors:
        process = Forked([sys.executable, "-m", "smoe", *line.split()], env=environment, stdout=write, stderr=errors)
        os.close(write)
        assert process.wait(60) == 141
    said = (tmp_path / "errors").read_text()
    assert "Traceback" not in said and "error" not in said


def test_only_what_is_near_is_suggested(run):
    assert "did you mean" not in run("generate", "demo", "--foo", "3", "-p", "Hi").err
    assert "did you mean --memory?" in run("generate", "demo", "--memroy", "3", "-p", "Hi").err


def test_a_prompt_without_its_option_is_quoted_as_it_must_be_typed(run):
    refused = run("generate", "demo", "Once upon a time")
    assert "-p 'Once upon a time'; smoe generate --help" in refused.err and refused.err.count("\n") == 1


def test_a_text_in_the_place_of_the_model_is_shown_as_a_prompt(run):
    refused = run("generate", "Once upon a time")
    assert refused.code == 2 and "hint: to continue this text: smoe generate MODEL -p 'Once upon a time'" in refused.err
    assert "to continue this text" not in run("generate", "./no such/model").err
    assert "to continue this text" not in run("chat", "Once upon a time").err


def test_a_mistyped_command_gets_a_suggestion(run):
    assert "no such command 'genrate' (did you mean generate?); smoe --help lists the commands" in run("genrate").err
    assert "no such command 'jion' (did you mean join?); smoe cluster --help" in run("cluster", "jion").err


@pytest.mark.parametrize(("typed", "meant"), [("run", "chat"), ("version", "--version"), ("-v", "--version")])
def test_words_of_other_programs_are_translated(run, typed, meant):
    assert f"(did you mean {meant}?); smoe --help lists the commands" in run(typed).err


@pytest.mark.parametrize("option", ["-m", "--model"])
def test_a_model_that_is_given_by_an_option_is_shown_in_its_place(run, option):
    for command in ("generate", "serve"):
        refused = run(command, option, "./my model")
        assert f"{option} is unknown: the model is given without an option: smoe {command} './my model';" in refused.err


@pytest.mark.parametrize(
    ("option", "given", "meant"),
    [("--preset", "balancd", "balanced"), ("--eviction", "lfuu", "lfu"), ("--kernels", "trch", "torch")],
)
def test_a_misspelt_value_gets_a_suggestion(run, option, given, meant):
    refused = run("generate", "demo", option, given, "-p", "Hi")
    assert refused.code == 2 and f"{option} is {given!r} (did you mean {meant}?); choose one of: " in refused.err
