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
        words = [a if isinstance(a, bytes) else str(a) for a in arguments]
        return subprocess.Popen([*LINE, *words], env=environment(tmp_path), **(streams | named))  # type: ignore[call-overload]

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
def test_an_interrupted_eval_keeps_what_it_has_and_goes_on(start, checkpoint, tmp_path, number):
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
    again = start(*line[:-1], "0", "--out", kept)
    code, out, _ = ended(again)
    assert code == 0 and json.loads(out)["prices"][0]["alpha"] == 0
    assert len(json.loads(found[0].read_text())["qualities"]) == count, "alpha 0 was measured already"


def test_an_eval_that_ends_keeps_nothing(start, checkpoint, tmp_path):
    code, _, _ = ended(start(*eval_line(checkpoint, tmp_path)[:-1], "0"))
    assert code == 0 and not list(tmp_path.glob("smoe-*"))


def test_a_closed_stdin_is_said(start, checkpoint):
    close = {"preexec_fn": lambda: os.close(0), "stdin": None}
    code, out, err = ended(start("chat", checkpoint, *SMALL, **close))
    assert (code, out) == (2, "") and "stdin" in err and "error:" in err
    code, _, err = ended(start("generate", checkpoint, *SMALL, **close))
    assert code == 2 and "there is no prompt" in err
    code, _, err = ended(start("generate", checkpoint, *SMALL, "--prompt-file", "-", **close))
    assert code == 2 and "stdin is closed" in err


def test_closed_output_is_survived(start, checkpoint):
    close = {"preexec_fn": lambda: os.close(1), "stdout": None}
    code, _, err = ended(start("generate", checkpoint, *SMALL, "-p", "Hi", "--max-new-tokens", 4, **close))
    assert code == 0 and "first token" in err


def test_bytes_that_are_no_text(start, checkpoint):
    code, out, err = ended(start("generate", checkpoint, *SMALL, "-p", b"caf\xe9"))
    assert (code, out) == (2, "") and "--prompt" in err and "UTF-8" in err
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
    assert code == 0 and "UTF-8" in err and "tokens were known" in err


def in_a_terminal(arguments: list[object], tmp_path: Path, columns: int) -> str:
    """What a terminal of so many columns shows of both streams."""
    import fcntl
    import pty
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    settings = {**environment(tmp_path), "TERM": "xterm"}
    settings.pop("COLUMNS", None)
    process = subprocess.Popen(
        [*LINE, *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave, env=settings, start_new_session=True
    )
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
    return shown.decode()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_a_bar_with_the_time_left_and_no_json(checkpoint, tmp_path, columns):
    line = eval_line(checkpoint, tmp_path)
    shown = in_a_terminal([*line[:-1], "0,0.1,0.2,0.3,0.4"], tmp_path, columns)
    assert " left" in shown and '"prices"' not in shown and "perplexity" in shown
