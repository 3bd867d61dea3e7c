"""Real processes: signals, closed streams, bytes that are no text, a terminal.

Would catch a SIGTERM that loses what was generated or measured, a traceback where a stream is closed, JSON in a
terminal, a bar that does not say how long it will take.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import smoe
from tests import forked
from tests.forked import Forked
from tests.toy import save_toy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="POSIX signals and terminals"),
]
LINE = [sys.executable, "-m", "smoe"]
SMALL = ["--memory", "64MiB", "--threads", "1"]


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(Path(smoe.__file__).parents[1]),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path),
    }


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    def start(*arguments: object, **named: object) -> subprocess.Popen[bytes]:
        streams: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return Forked([*LINE, *arguments], env=environment(tmp_path), **(streams | named))

    return start


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    assert b"Traceback" not in err, err.decode()
    return process.returncode, (out or b"").decode(), err.decode()


def test_sigterm_ends_a_generation_in_order(start, tmp_path):
    model = save_toy(tmp_path / "model", eos_token_id=None)
    process = start("generate", model, *SMALL, "-p", "Hi", "--max-new-tokens", 254)
    first = process.stdout.read(1)
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code in (143, 0) and (first.decode() + out).endswith("\n") and "first token" in err


def test_sigterm_leaves_a_conversation(start, checkpoint):
    process = start("chat", checkpoint, *SMALL, stdin=subprocess.PIPE)
    process.stdin.write(b"One\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    time.sleep(1)  # the answer ends, or is about to: in both states the signal means the same
    process.send_signal(signal.SIGTERM)
    code, _, _ = ended(process)
    assert code == 143


def eval_line(model: Path, tmp_path: Path) -> list[object]:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "once upon a time there was a cat " * 7}) + "\n")
    options = ["--memory", "2700KiB", "--context", 128, "--threads", 1, "--text", text, "--most-questions", 0]
    return ["eval", model, *options, "--alphas", ",".join(str(n / 100) for n in range(100))]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_eval_keeps_what_it_has_and_goes_on(start, run, checkpoint, tmp_path, number):
    line = eval_line(checkpoint, tmp_path)
    process = start(*line)
    until = time.monotonic() + 60
    while not (found := list(tmp_path.glob("smoe-*/quality.json"))) and time.monotonic() < until:
        time.sleep(0.05)
    assert found
    process.send_signal(number)
    code, out, err = ended(process)
    assert (code, out) == ({signal.SIGTERM: 143, signal.SIGINT: 130}[number], "")
    kept = found[0].parent
    assert f"--out {kept}" in err.replace("\n", " ")
    count = len(json.loads(found[0].read_text())["qualities"])
    assert count >= 1
    again = run(*line[:-1], "0", "--out", kept)
    assert again.code == 0 and again.json["prices"][0]["alpha"] == 0
    assert len(json.loads(found[0].read_text())["qualities"]) == count, "alpha 0 was measured already"


def test_an_eval_that_ends_keeps_nothing(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(*eval_line(checkpoint, tmp_path)[:-1], "0").code == 0
    assert not list(tmp_path.glob("smoe-*"))


ONE_AFTER_THE_OTHER = """
import json, sys
from smoe.cli import main
for line in json.loads(sys.argv.pop()):
    sys.argv[1:] = line
    try:
        main()
    except SystemExit as end:
        print(end.code, end="\\f", flush=True)
    print(end="\\f", file=sys.stderr, flush=True)
"""
"""The commands of the last argument, one after the other; code and a form feed behind each."""


def test_a_closed_stdin_is_said_and_an_argument_that_is_no_text(checkpoint, tmp_path):
    asked = [
        ["chat", checkpoint, *SMALL],
        ["generate", checkpoint, *SMALL],
        ["generate", checkpoint, *SMALL, "--prompt-file", "-"],
        ["generate", checkpoint, *SMALL, "-p", os.fsdecode(b"caf\xe9")],
    ]
    line = [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(asked, default=str)]
    ran = forked.run(line, env=environment(tmp_path), text=True, timeout=120, closed=[0])
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    assert ran.stdout.split("\f")[:-1] == ["2"] * len(asked), "a code each, and nothing else"
    chat, none, file, no_text = ran.stderr.split("\f")[:-1]
    assert "stdin" in chat and "error:" in chat
    assert "there is no prompt" in none
    assert "stdin is closed" in file
    assert "--prompt" in no_text and "UTF-8" in no_text


def test_closed_output_is_survived(start, checkpoint):
    asked = ("generate", checkpoint, *SMALL, "-p", "Hi", "--max-new-tokens", 4)
    code, _, err = ended(start(*asked, closed=[1], stdout=None))
    assert code == 0 and "first token" in err


def test_bytes_that_are_no_text(start, checkpoint):
    process = start("generate", checkpoint, *SMALL, stdin=subprocess.PIPE)
    process.stdin.write(b"caf\xe9")
    process.stdin.close()
    process.stdin = None
    code, out, err = ended(process)
    assert (code, out) == (2, "") and "UTF-8" in err
    process = start("chat", checkpoint, *SMALL, "--max-new-tokens", 4, stdin=subprocess.PIPE)
    process.stdin.write(b"caf\xe9\nOne\n/quit\n")
    process.stdin.close()
    process.stdin = None
    code, _, err = ended(process)
    assert code == 0 and "UTF-8" in err and "tokens were in the KV cache" in err


IN_TURN = """
import fcntl, struct, sys, termios
from smoe.cli import main
for columns in sys.argv.pop(1).split(","):
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, int(columns), 0, 0))
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    print("\\f", end="", flush=True)
"""
"""The command that follows the columns, in a terminal of so many after the other; a form feed behind each."""


def in_terminals(columns: list[int], arguments: list[object], tmp_path: Path) -> list[str]:
    """What terminals of so many columns show of both streams."""
    import pty

    master, slave = pty.openpty()
    settings = {**environment(tmp_path), "TERM": "xterm"}
    settings.pop("COLUMNS", None)
    line = [sys.executable, "-c", IN_TURN, ",".join(map(str, columns)), *map(str, arguments)]
    process = Forked(line, stdin=slave, stdout=slave, stderr=slave, env=settings, start_new_session=True)
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode().split("\f")[:-1]


def test_a_terminal_gets_a_bar_with_the_time_left_and_no_json(checkpoint, tmp_path):
    line, columns = eval_line(checkpoint, tmp_path), [80, 120]
    in_each = in_terminals(columns, [*line[:-1], "0,0.1,0.2,0.3,0.4"], tmp_path)
    assert len(in_each) == len(columns)
    for shown in in_each:
        assert " left" in shown and '"prices"' not in shown and "perplexity" in shown
