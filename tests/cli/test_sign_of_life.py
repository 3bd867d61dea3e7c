"""What is shown while a command prepares its work. Would catch silence of some seconds, progress that goes backward,
and a total that is never reached."""

from __future__ import annotations

import sys
from io import StringIO
from threading import Event
from types import SimpleNamespace

import pytest

from smoe.cli import console, session
from smoe.cli.console import Patience, doing, speaking

TITLES = {
    "generate": ["importing the libraries", "reading the headers of", "loading "],
    "chat": ["importing the libraries", "reading the headers of", "loading "],
    "doctor": ["importing the libraries"],
}


@pytest.mark.parametrize("command", TITLES)
def test_every_phase_is_named(run, monkeypatch, tmp_path, quick, command):
    titles = []
    start = Patience.start
    monkeypatch.setattr(Patience, "start", lambda bar: (titles.append(bar.title), start(bar)))
    monkeypatch.setattr(sys, "stdin", StringIO("/quit\n"))
    more = ("--folder", tmp_path) if command == "doctor" else ("demo", "--memory", "20MiB")
    more += ("-p", "One", "--max-new-tokens", 2) if command == "generate" else ()
    ran = run(command, *more)
    assert ran.code == 0, ran.err
    for place, title in enumerate(TITLES[command]):
        assert titles[place].startswith(title), titles
    if command == "doctor":
        assert "measuring memory, disk and arithmetic" in ran.err


def _shown(monkeypatch, capsys, quietly):
    """What a phase prints into a pipe until its amount has been asked for twice."""
    monkeypatch.setattr(console, "_SILENT_SECONDS", 0.0)
    calls, twice = [], Event()

    def amount():
        calls.append(1)
        if len(calls) == 2:
            twice.set()
        return 2**20, None

    with speaking(quietly=quietly):
        bar = Patience("reading", amount)
        bar.start()
        assert twice.wait(30)
        bar.stop()
    return capsys.readouterr()


def test_a_pipe_gets_one_line(monkeypatch, capsys):
    assert _shown(monkeypatch, capsys, quietly=False) == ("", "reading, 1.00 MiB\n")


def test_a_quiet_command_shows_no_phase(monkeypatch, capsys):
    assert _shown(monkeypatch, capsys, quietly=True) == ("", "")


def test_a_short_phase_prints_nothing_into_a_pipe(capsys):
    with speaking(quietly=False), doing("importing"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_terminal_is_shown_a_phase_within_a_second():
    assert console._PATIENCE_SECONDS < 1


def test_progress_of_loading_never_goes_backward_and_claims_no_total():
    watch, sizes = session._Watch("demo"), iter([5, 9, 7, 12])
    watch._process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(sizes)))
    shown = [watch._amount() for _ in range(4)]
    assert [done for done, _ in shown] == [5, 9, 9, 12] and {total for _, total in shown} == {None}
