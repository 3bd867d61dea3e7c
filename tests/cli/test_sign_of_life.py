"""What is shown while a command prepares its work. Would catch silence of some seconds."""

from __future__ import annotations

import shutil
import sys
from io import StringIO
from threading import Event

import pytest

from smoe.cli import console
from smoe.cli.console import Patience, doing, speaking
from smoe.models.safetensors_folder import SafetensorsFolder

DEMO, ROOM = ("demo", "--memory", "20MiB"), ("--memory", "4MiB", "--context", 128)

IMPORTS, TEXT = "importing the libraries", "reading the text"
HEADERS, TOKENIZER = "reading the headers of ", "reading the tokenizer of "
LOADING = [HEADERS, "loading ", "preparing "]
PHASES = {
    "generate": ((*DEMO, "-p", "One", "--max-new-tokens", 2), [IMPORTS, *LOADING]),
    "chat": (DEMO, [IMPORTS, *LOADING]),
    "plan": (DEMO, ["simulating runs"]),
    "doctor": (("--folder", "FOLDER"), [IMPORTS]),
    "verify": (("TOY", *ROOM), [IMPORTS, HEADERS, *LOADING]),
    "pack": (("TOY",), [IMPORTS, HEADERS]),
    "eval": (("TOY", *ROOM, "--text", "TEXT", "--alphas", 0, "--tokens", 12), [IMPORTS, TOKENIZER, *LOADING, TEXT]),
    "tune": (("TOY", *ROOM, "--text", "TEXT"), [IMPORTS, TOKENIZER, TEXT, *LOADING]),
    "bench": (("TOY", "--memory", "4MiB", "--quick"), [IMPORTS, *LOADING]),
    "record": (("TOY", *ROOM, "-p", "One", "--max-new-tokens", 2, "--out", "OUT"), [IMPORTS, *LOADING]),
}


@pytest.mark.parametrize("command", PHASES)
def test_every_phase_is_named(run, monkeypatch, tmp_path, quick, checkpoint, command):
    titles = []
    start = Patience.start
    monkeypatch.setattr(Patience, "start", lambda bar: (titles.append(bar.title), start(bar)))
    monkeypatch.setattr(sys, "stdin", StringIO("/quit\n"))
    line, phases = PHASES[command]
    places = {"FOLDER": tmp_path, "TOY": tmp_path / "toy", "TEXT": quick, "OUT": tmp_path / "a.trace"}
    shutil.copytree(checkpoint, places["TOY"])
    ran = run(command, *(places.get(word, word) for word in line))
    assert ran.code == 0, ran.err
    for place, title in enumerate(phases):
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
        return 2**20, 2**21

    with speaking(quietly=quietly):
        bar = Patience("reading", amount)
        bar.start()
        assert twice.wait(30)
        bar.stop()
    return capsys.readouterr()


def test_a_pipe_gets_one_line(monkeypatch, capsys):
    assert _shown(monkeypatch, capsys, quietly=False) == ("", "reading, 1.00 MiB of 2.00 MiB\n")


def test_a_quiet_command_shows_no_phase(monkeypatch, capsys):
    assert _shown(monkeypatch, capsys, quietly=True) == ("", "")


def test_a_short_phase_prints_nothing_into_a_pipe(capsys):
    with speaking(quietly=False), doing("importing"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_terminal_is_shown_a_phase_within_a_second():
    assert console._PATIENCE_SECONDS < 1


def test_loading_shows_the_bytes_read_and_the_bytes_to_read(run, monkeypatch, checkpoint):
    """Would catch an amount that is passed on and not shown. Loading waits in its middle until the amount is shown."""
    titles, is_shown, state, load_dense = set(), Event(), Patience._state, SafetensorsFolder.load_dense

    def seen(bar):
        found = state(bar)
        if found["amount"] == "3.00 GiB of 6.00 GiB":
            titles.add(bar.title)
            is_shown.set()
        return found

    def half(self, spec, device, on_bytes):
        on_bytes(3 << 30, 6 << 30)
        assert is_shown.wait(30)
        return load_dense(self, spec, device, on_bytes)

    monkeypatch.setattr(console, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(Patience, "_state", seen)
    monkeypatch.setattr(SafetensorsFolder, "load_dense", half)
    ran = run("generate", checkpoint, *ROOM, "-p", "One", "--max-new-tokens", 2)
    assert ran.code == 0, ran.err
    assert titles == {f"loading {checkpoint}"}
