"""`smoe launch`: programs of these tests in the place of the real ones, with real servers. Would catch a program that
asks another server, one that is started without any, and a server that outlives its program."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import pytest
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.cli import launch
from smoe.cli.programs import PROGRAMS, RunningServer, program_of
from tests import forked
from tests.cli.conftest import Run
from tests.forked import Forked
from tests.server.conftest import Running, eventually, served
from tests.toy import TEMPLATE, save_toy

ROOM = ("--memory", "8MiB", "--context", 128)
PROGRAM = """#!{python} -S
import json, os, sys, time, urllib.request
url = os.environ.get("ANTHROPIC_BASE_URL") or os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
with urllib.request.urlopen(url + "/v1/models") as answer:
    model = json.load(answer)["data"][0]["id"]
seen = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "model": model, "pid": os.getpid()}}
with open(os.environ["SEEN"] + ".new", "w") as file:
    json.dump(seen, file)
os.rename(os.environ["SEEN"] + ".new", os.environ["SEEN"])
while "--wait" in sys.argv:
    time.sleep(60)
sys.exit(5)
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Programs that write what they got, and the reader of that."""
    (tmp_path / "bin").mkdir()
    for name in ("aider", "claude", "other"):
        path = tmp_path / "bin" / name
        path.write_text(PROGRAM.format(python=sys.executable))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.delenv("SMOE_API_KEY", raising=False)
    return lambda: dict(json.loads((tmp_path / "seen").read_text()))


@pytest.fixture(scope="module")
def running(checkpoint: Path) -> Iterator[Running]:
    model = from_pretrained(checkpoint, memory="4MiB", context_tokens=128)
    with model.offload, served(model, AutoTokenizer.from_pretrained(checkpoint)) as running:
        yield running


def port_of(running: Running) -> str:
    return running.url.rpartition(":")[2]


def test_a_server_is_started_and_ends_with_the_program(
    run: Run, seen: Callable[[], dict[str, Any]], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Popen[Any]] = []

    def start(line: list[str], **options: Any) -> Popen[Any]:
        started.append(Forked(line, **options) if "serve" in line else Popen(line, **options))
        return started[-1]

    monkeypatch.setattr(launch, "Popen", start)
    ran = run("launch", "aider", checkpoint, *ROOM, "--port", 0, "--", "--yes", "--port", "1", "--", "a b")
    assert ran.code == 5 and ran.err.startswith(f"starting smoe serve {checkpoint}")
    found = seen()
    assert found["arguments"] == [
        "--model", f"openai/{checkpoint.name}", "--no-show-model-warnings", "--yes", "--port", "1", "--", "a b"
    ]  # fmt: skip
    assert found["model"] == checkpoint.name and found["environment"]["OPENAI_API_KEY"] == "none"
    server, program = started
    assert server.returncode == 143 and program.returncode == 5
    with pytest.raises(OSError):
        urllib.request.urlopen(found["environment"]["OPENAI_BASE_URL"] + "/models")


def test_a_running_server_is_used(run: Run, seen: Callable[[], dict[str, Any]], running: Running) -> None:
    assert run("launch", "claude", "--port", port_of(running), "--", "-p", "Hello").code == 5
    found = seen()
    assert (found["arguments"], found["model"]) == (["-p", "Hello"], "demo")
    assert (
        found["environment"]["ANTHROPIC_BASE_URL"] == running.url and found["environment"]["ANTHROPIC_MODEL"] == "demo"
    )
    assert found["environment"]["ANTHROPIC_API_KEY"] == "", "a key for another server stays here"
    assert found["environment"]["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "128", "the context of the server"
    assert run("launch", "other", f"--port={port_of(running)}").code == 5
    environment = seen()["environment"]
    assert environment["OLLAMA_HOST"] == running.url and environment["OPENAI_MODEL"] == "demo"
    ran = run("launch", "claude", "./my-moe", "--port", port_of(running))
    assert ran.code == 2 and f"a server of demo runs at {running.url} already" in ran.err


def test_the_key_is_given(run: Run, seen: Callable[[], dict[str, Any]], running: Running) -> None:
    assert run("launch", "claude", "--port", port_of(running), "--api-key", "a-key").code == 5
    assert seen()["environment"]["ANTHROPIC_AUTH_TOKEN"] == "a-key"


def test_what_is_missing_is_said(run: Run, seen: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    ran = run("launch", "codex", "--port", "1")
    assert ran.code == 2 and "codex is not installed" in ran.err and "npm install -g @openai/codex" in ran.err
    ran = run("launch", "nowhere", "--port", "1")
    allowed = "give aider, claude, codex, opencode, qwen, or another command on PATH"
    assert ran.code == 2 and f"there is no program 'nowhere' on PATH; {allowed}" in ran.err
    assert "no program 'claud' on PATH (did you mean claude?)" in run("launch", "claud", "--port", "1").err
    for model in ("demo", tmp_path, "a/b", "./c.gguf"):
        assert (
            f"the program stands before the model: smoe launch claude {model} --memory 8GiB" in run("launch", model).err
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ran = run("launch", "aider", "--port", free.getsockname()[1])
    assert ran.code == 2 and "give a model and its budget: smoe launch aider ./my-moe --memory 8GiB" in ran.err
    assert not (tmp_path / "seen").exists()


def test_a_server_that_does_not_start_is_an_error(
    run: Run, seen: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "Popen", Forked)
    ran = run("launch", "aider", tmp_path / "nowhere", "--port", "0")
    assert ran.code == 2 and "error: smoe serve did not start: " in ran.err and "nowhere" in ran.err
    assert not (tmp_path / "seen").exists()


def test_help_is_that_of_the_command(run: Run) -> None:
    for line in (("--help",), ("aider", "./my-moe", "-h")):
        ran = run("launch", *line)
        assert ran.code == 0 and "smoe launch PROGRAM [MODEL]" in ran.out


def test_signals_other_than_ctrl_c_end_the_program(
    seen: Callable[[], dict[str, Any]], running: Running, tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "smoe", "launch", "other", "--port", port_of(running), "--", "--wait"]
    with Forked(line, stdout=PIPE, stderr=PIPE, start_new_session=True) as process:
        eventually((tmp_path / "seen").exists)
        process.send_signal(signal.SIGINT)
        program = seen()["pid"]
        os.kill(program, 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(program, 0)


@pytest.mark.parametrize("name", [*PROGRAMS, "other"])
def test_every_program_gets_the_server(name: str) -> None:
    server = RunningServer("http://127.0.0.1:8000", 'a "model"', "a-key", 32768)
    program = program_of(name)
    given = program.environment(server)
    words = [*given.values(), *program.arguments(server)]
    assert any(server.url in word for word in words) and any("a-key" in word for word in words)


def test_settings_within_settings_are_well_formed() -> None:
    server = RunningServer("http://127.0.0.1:8000", 'a "model"', "a-key", 32768)
    config = json.loads(PROGRAMS["opencode"].environment(server)["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == 'smoe/a "model"' and config["provider"]["smoe"]["models"] == {
        'a "model"': {"name": 'a "model"', "limit": {"context": 32768, "output": 8192}}
    }
    arguments = PROGRAMS["codex"].arguments(server)
    settings = dict(word.split("=", 1) for word in arguments if "=" in word)
    assert json.loads(settings["model_provider"]) == "smoe" and arguments[-2:] == ["-m", 'a "model"']
    assert json.loads(settings["model_context_window"]) == 32768
    assert json.loads(settings["model_providers.smoe.base_url"]) == "http://127.0.0.1:8000/v1"


AIDER = os.environ.get("SMOE_AIDER", "")
QUIET = ("--no-git", "--yes-always", "--no-check-update", "--no-analytics", "--no-pretty", "--edit-format", "ask")


@pytest.mark.skipif(not AIDER, reason="SMOE_AIDER names no aider")
def test_aider_asks_the_server(tmp_path: Path) -> None:
    """The real agent, in a folder and a home of its own: `make test-optional` installs it."""
    folder = save_toy(tmp_path / "model", template=TEMPLATE, max_position_embeddings=8192)
    model = from_pretrained(folder, memory="24MiB", context_tokens=4096)
    line = [sys.executable, "-m", "smoe", "launch", "aider", "--port", "PORT", "--", "--message", "Hello", *QUIET]
    environment = {**os.environ, "PATH": f"{Path(AIDER).parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    (tmp_path / "work").mkdir()
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder)) as running:
        line[line.index("PORT")] = port_of(running)
        ran = forked.run(line, timeout=300, env=environment, cwd=tmp_path / "work", stdin=DEVNULL, text=True)
        answers = running.serving.meters.count("smoe_http_requests")
    assert ran.returncode == 0 and "Model: openai/demo" in ran.stdout, ran.stdout + ran.stderr
    assert answers["/v1/chat/completions", "200"] == 1
