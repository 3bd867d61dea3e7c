"""Progress where nobody sees a bar. Would catch a silent log, a line for every token, control characters in a file."""

from __future__ import annotations

import json

import pytest
import typer

from smoe.cli import app
from smoe.cli.console import progress, words_of
from smoe.errors import ConfigError, ContextError
from tests.toy import save_toy


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_log_gets_a_line_every_ten_seconds(capsys):
    clock = Clock()
    with progress("eval", "tokens", clock) as bars:
        task = bars.add_task("alpha 0.3", total=1200, amount="")
        for second in range(1, 26):
            clock.seconds = second
            bars.update(task, advance=10)
    assert capsys.readouterr() == (
        "",
        "eval: alpha 0.3, 100 of 1,200 tokens, 2 min left\neval: alpha 0.3, 200 of 1,200 tokens, 2 min left\n",
    )


def test_lines_say_what_is_known(capsys):
    """No unit where the task has words of its own, no time left where the end is unknown or a guess was too low."""
    clock = Clock()
    with progress(clock=clock) as bars:
        loading, measuring = bars.add_task("loading", total=None, amount=""), bars.add_task("[0]", total=5, amount="")
        clock.seconds = 10
        bars.update(loading, completed=1, amount="1 GiB of 2 GiB")
        clock.seconds = 20
        bars.update(measuring, completed=7)
    assert capsys.readouterr().err == "loading, 1 GiB of 2 GiB\n[0], 7 of 5\n"


def test_two_lines_of_a_task_without_an_amount_differ(capsys):
    clock = Clock()
    with progress(clock=clock) as bars:
        task = bars.add_task("simulating", total=None, amount="")
        for clock.seconds in (10, 20):
            bars.update(task)
    assert capsys.readouterr().err == "simulating, 10 s so far\nsimulating, 20 s so far\n"


TEXT = "once upon a time there was a cat " * 8
COMMANDS = {
    "eval": (("--alphas", "0,0.6", "--tokens", 12), "eval: measuring alpha 0.6 (2 of 2), 18 of 26 tokens, "),
    "tune": (("--context", 128), "tune: measuring, 5 of "),
    "bench": (("--quick",), "bench: 16 + 64 tokens, batch 1, 1 of 2 cells, "),
    "pack": (None, "pack: packing, "),
    "verify": ((), "verify: comparing layers, layer 1, decode"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_long_commands_speak_to_a_log(run, tmp_path, monkeypatch, name):
    """As if every update came after ten seconds."""
    monkeypatch.setattr("smoe.cli.console._LINE_SECONDS", 0)
    monkeypatch.setattr("smoe.eval.tune._WARM_TOKENS", 4)
    monkeypatch.setattr("smoe.eval.tune._TIMED_TOKENS", 6)
    options, words = COMMANDS[name]
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": TEXT}) + "\n")
    asked = () if options is None else ("--memory", "4MiB", *options)
    asked += ("--text", text) if name in ("eval", "tune") else ()
    ran = run(name, save_toy(tmp_path / "model"), *asked)
    assert ran.code == 0 and any(line.startswith(words) for line in ran.err.splitlines()), ran.err
    assert not set(ran.err) & {"\x1b", "\r"}


def test_a_terminal_is_told_the_time_left(capsys, monkeypatch):
    """By what has been done since the start, and less with every second, also where a step takes minutes."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    clock = Clock()
    with progress("bench", "cells", clock) as bars:
        task = bars.add_task("16 + 64 tokens", total=8, amount="")
        clock.seconds = 100
        bars.update(task, completed=2)
        bars.refresh()
        clock.seconds = 160
        bars.refresh()
    shown = capsys.readouterr().err
    assert "5 min left" in shown and "4 min left" in shown and "6 min left" not in shown


def test_what_was_there_before_does_not_shorten_the_time_left(capsys):
    clock = Clock()
    with progress("eval", "tokens", clock) as bars:
        task = bars.add_task("alpha 0.6", total=700, amount="", skipped=600)
        clock.seconds = 20
        bars.update(task, completed=610)
    assert capsys.readouterr().err == "eval: alpha 0.6, 610 of 700 tokens, 3 min left\n"


def test_a_terminal_gets_bars(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what the library takes for a terminal
    monkeypatch.setattr("smoe.cli.console._LINE_SECONDS", 0)
    with progress("eval", "tokens") as bars:
        bars.update(bars.add_task("alpha 0", total=2, amount=""), advance=1)
    shown = capsys.readouterr().err
    assert "\x1b" in shown and "eval:" not in shown


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ContextError("raise `context_tokens`"), "raise --context"),
        (ConfigError("give one of `memory` and `host_memory`"), "give one of --memory and --host-memory"),
        (ConfigError("use `precision=int4` or `io_threads=2`"), "use --precision int4 or --set io_threads=2"),
        (ConfigError("`count=process` needs `memory=1GiB`"), "--process-memory needs --memory 1GiB"),
        (ConfigError("see `smoe plan`, or `A_B`"), "see `smoe plan`, or `A_B`"),
    ],
)
def test_settings_are_shown_as_options(error, shown):
    """Would catch a message that a user of the command line cannot follow."""
    assert words_of(error) == shown


def test_prose_of_help_fits_its_lines():
    """Would catch a line of a terminal with a word or two, because one before it is too long by a little."""
    commands = [("smoe", typer.main.get_command(app))]
    while commands:
        name, command = commands.pop()
        commands += [(f"{name} {word}", each) for word, each in getattr(command, "commands", {}).items()]
        for paragraph in (command.epilog or "").strip().split("\n\n"):
            lines = paragraph.splitlines()
            if len(lines) > 1 and not any(line.startswith(("smoe ", "{")) for line in lines):
                assert max(map(len, lines)) <= 78, (name, lines)
