"""Real coding agents, started by `smoe launch`: each reads a file with a tool of its own, and shows an answer. The
model's texts are given. Would catch a request that is refused, an answer that an agent does not understand, and a
program that writes where it must not.

`make test-optional` installs them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from smoe import from_pretrained
from smoe.models.files import DEMO_FOLDER
from tests import forked, zoo
from tests.clients.scripted import TEMPLATE, scripted
from tests.server.conftest import Running, served

AGENTS = Path(os.environ.get("SMOE_NPM", "/nonexistent")) / "node_modules" / ".bin"
pytestmark = pytest.mark.skipif(not AGENTS.is_dir(), reason="SMOE_NPM names no packages of npm")
SECRET = "The lamp is green."
QUESTION = "Which colour has the lamp in notes.txt?"


class Agent(NamedTuple):
    """An agent, and how it is asked one question without a terminal."""

    arguments: tuple[str, ...]
    path: str
    """The endpoint that it uses."""
    call: Callable[[Path], dict[str, Any]]
    """The call by which it reads a file."""


AGENT = {
    "claude": Agent(
        ("-p", QUESTION),
        "/v1/messages",
        lambda file: {"name": "Read", "arguments": {"file_path": str(file)}},
    ),
    "codex": Agent(
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION),  # its sandbox needs rights
        "/v1/responses",
        lambda file: {"name": "exec_command", "arguments": {"cmd": f"cat {file}"}},
    ),
    "opencode": Agent(
        ("run", QUESTION),
        "/v1/chat/completions",
        lambda file: {"name": "read", "arguments": {"filePath": str(file)}},
    ),
    "qwen": Agent(
        ("-p", QUESTION),
        "/v1/chat/completions",
        lambda file: {"name": "read_file", "arguments": {"file_path": str(file)}},
    ),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A toy with the vocabulary of the embedded model, and room for the long prompts of agents."""
    folder = tmp_path_factory.mktemp("agents")
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER)
    tokenizer.chat_template = TEMPLATE
    zoo.save("qwen2_moe", folder, vocab_size=len(tokenizer), max_position_embeddings=131072, eos_token_id=0)
    tokenizer.save_pretrained(folder)
    model = from_pretrained(folder, memory="200MiB", context_tokens=65536, max_sequences=2)
    with model.offload, served(model, AutoTokenizer.from_pretrained(folder), api_key="a-key") as running:
        yield running


@pytest.mark.parametrize("name", AGENT)
def test_an_agent_reads_a_file_and_shows_the_answer(
    running: Running, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, home, agent = tmp_path / "work", tmp_path / "home", AGENT[name]
    work.mkdir()
    home.mkdir()
    notes = work / "notes.txt"
    notes.write_text(SECRET)
    call = agent.call(notes)

    def answer(prompt: str) -> str:
        begun = "I see.</think>" if prompt.endswith("<think>") else ""
        if SECRET in prompt:
            return begun + "It is green, as I have read."
        reads = prompt.startswith("tools") and f"[{call['name']} " not in prompt
        return begun + (f"Wait.<tool_call>{json.dumps(call)}</tool_call>" if reads else "I do not know.")

    scripted(monkeypatch, running.serving.tokenizer, answer)
    before = running.serving.meters.count("smoe_http_requests")
    line = [sys.executable, "-m", "smoe", "launch", name, "--port", running.url.rpartition(":")[2]]
    environment = {"PATH": f"{AGENTS}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "SMOE_API_KEY": "a-key"}
    ran = forked.run([*line, "--", *agent.arguments], timeout=500, env=environment, cwd=work, stdin=DEVNULL, text=True)
    assert ran.returncode == 0 and "It is green, as I have read." in ran.stdout, ran.stdout + ran.stderr
    after = running.serving.meters.count("smoe_http_requests")
    asked = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
    assert asked[agent.path, "200"] >= 2 and {status for _, status in asked} == {"200"}, asked
    assert [path.name for path in work.iterdir()] == ["notes.txt"] and notes.read_text() == SECRET
