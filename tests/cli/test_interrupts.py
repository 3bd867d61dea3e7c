"""What signals mean to a command. Would catch one that is lost in a destructor, a second one that ends in a traceback,
a signal that was to be ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from smoe.cli import interrupts
from smoe.cli.interrupts import Terminated, answered_by, at_the_first, ending_in_order, exit_code, listening

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_a_command_in_order(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with listening(), pytest.raises(typer.Exit) as end, ending_in_order(as_json=False):
        signal.raise_signal(number)
    assert end.value.exit_code == 128 + number and capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(number) is before


def test_a_hangup_is_said_twice_and_meant_once() -> None:
    with listening():
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.was_terminated() and exit_code() == 129


def test_what_answers_signals_is_told_of_them() -> None:
    told: list[int] = []
    with listening(), answered_by(told.append):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert told == [signal.SIGINT, signal.SIGTERM] and exit_code() == 143


class Deaf:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_one_that_a_destructor_swallows_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(), pytest.raises(KeyboardInterrupt), at_the_first():
        Deaf()
        with answered_by(lambda number: None):
            raise AssertionError("went on")
    assert not capsys.readouterr().err


def test_an_error_that_one_has_become_is_no_error() -> None:
    with listening(), pytest.raises(KeyboardInterrupt), at_the_first():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cut in two") from None


def test_one_more_while_it_ends_changes_nothing() -> None:
    ended = False
    with listening(), pytest.raises(KeyboardInterrupt), at_the_first():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            ended = True
    assert ended


def run(code: str, folder: Path) -> tuple[int, str, str]:
    command = [sys.executable, "-c", f"import signal\nfrom smoe.cli.interrupts import *\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    return done.returncode, done.stdout, done.stderr


HIT = "signal.raise_signal(signal.SIGINT)"
IN_ORDER = "with listening(), ending_in_order(as_json=True):\n "


@pytest.mark.parametrize(
    ("code", "out"),
    [
        (f"{IN_ORDER}with at_the_first():\n  try:\n   {HIT}\n  finally:\n   {HIT}\n   {HIT}", '{"error"'),
        (f"{IN_ORDER}import hits_itself", '{"error"'),
        (f"import smoe.cli.console as c\nc.note = lambda *words, **more: {HIT}\n{IN_ORDER}{HIT}", ""),
    ],
    ids=["the third", "in an import", "while the word is said"],
)
def test_it_leaves_at_once(code: str, out: str, tmp_path: Path) -> None:
    (tmp_path / "hits_itself.py").write_text(f"import signal\ntry:\n {HIT}\nexcept BaseException:\n pass\n")
    status, said, errors = run(code, tmp_path)
    assert (status, errors) == (130, "interrupted\n") and said.startswith(out)


def test_what_is_to_be_ignored_stays_ignored(tmp_path: Path) -> None:
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code = f"{ignored}with listening():\n signal.raise_signal(signal.SIGHUP)\n print('here')"
    assert run(code, tmp_path) == (0, "here\n", "")
