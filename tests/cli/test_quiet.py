"""How much a command says: less with --quiet, more with --verbose or SMOE_LOG.

Would catch a summary in a script's log, a warning that quiet swallows, a library that prints by itself.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smoe

ASKED = ("--memory", "64MiB", "-p", "Hello", "--max-new-tokens", 8)


def test_quiet_leaves_the_text_alone(run, checkpoint):
    loud, quiet = run("generate", checkpoint, *ASKED), run("generate", checkpoint, *ASKED, "--quiet")
    assert loud.out == quiet.out != "" and loud.err and quiet.err == ""
    assert run("generate", checkpoint, *ASKED, "-q", "--json").err == ""
    assert run("generate", checkpoint, *ASKED).err == "" or "first token" in run("generate", checkpoint, *ASKED).err


def test_warnings_and_errors_are_said_all_the_same(run, checkpoint):
    ran = run("generate", checkpoint, "--memory", "64MiB", "--context", 32, "-p", "x" * 20, "-q")
    assert "at most 12 new tokens are generated instead of 128" in ran.err and len(ran.err.splitlines()) == 1
    ran = run("generate", checkpoint, "--memory", "plenty", "-p", "x", "-q")
    assert ran.code == 2 and "is not a size" in ran.err


@pytest.mark.parametrize("name", ["plan", "verify", "record", "bench", "eval"])
def test_quiet_commands_give_their_result(run, checkpoint, tmp_path, name):
    text = tmp_path / "text.txt"
    text.write_text("once upon a time there was a cat " * 8)
    more = {
        "record": ("--out", tmp_path / "x.trace", "-p", "One", "--max-new-tokens", 4),
        "bench": ("--quick",),
        "eval": ("--alphas", "0", "--tokens", 20, "--text", text, "--context", 128),
    }.get(name, ())
    ran = run(name, checkpoint, "--memory", "4MiB", "-q", *more)
    assert ran.code == 0 and ran.out and ran.err == ""


def test_a_quiet_conversation_is_answers(run, checkpoint, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("One\n/settings\n/quit\n"))
    ran = run("chat", checkpoint, "--memory", "64MiB", "--max-new-tokens", 8, "-q")
    assert ran.code == 0 and ran.out and "were in the KV cache" not in ran.err and "temperature" in ran.err


def test_verbose_shows_the_log(run, checkpoint, monkeypatch):
    assert "INFO smoe" not in run("generate", checkpoint, *ASKED).err
    assert "INFO smoe" in run("generate", checkpoint, *ASKED, "--verbose").err
    ran = run("generate", checkpoint, *ASKED, "-vv", "-q")
    assert "DEBUG smoe" in ran.err and "first token after" not in ran.err
    monkeypatch.setenv("SMOE_LOG", "info")
    assert "INFO smoe" in run("generate", checkpoint, *ASKED).err
    monkeypatch.setenv("SMOE_LOG", "loud")
    ran = run("generate", checkpoint, *ASKED)
    assert ran.code == 2 and "SMOE_LOG" in ran.err and "debug" in ran.err
    assert [type(handler) for handler in logging.getLogger("smoe").handlers] == [logging.NullHandler]


def test_the_library_is_silent_until_asked():
    code = "import logging, smoe; logging.getLogger('smoe.anything').error('heard')"
    environment = {**os.environ, "PYTHONPATH": str(Path(smoe.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
