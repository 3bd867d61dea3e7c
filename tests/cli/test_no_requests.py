"""Models that are on disk already: no command asks the hub about them, whatever the environment says.

Would catch a tokenizer of more than 100,000 tokens, which the library looks up by its name to find out whether it is
one of Mistral's; a bare file or folder name that is taken for a repository's; a file that does not load offline.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests import gguf_toy, zoo
from tests.toy import save_toy

SMALL = ("--memory", "64MiB", "--context", "96")
FILLING = [f"[PAD{number}]" for number in range(100_001)]
"""Tokens that no text has: the library's question depends on how many there are."""
COMMANDS = """
import json, sys
from smoe import cli
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["smoe", *arguments]
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    assert code == 0, arguments
"""
"""Runs several commands in one process, which reads the environment once."""


class Hub(http.server.BaseHTTPRequestHandler):
    """Notes the path of each request, and has nothing."""

    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_error(404)

    do_HEAD = do_POST = do_GET  # noqa: N815 -- the names that the standard library calls

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """The address of a hub, and the paths that were asked for."""
    paths: list[str] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Noting", (Hub,), {"paths": paths}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where `toy.gguf` and the folder `toy` are, both with a large vocabulary, and a text."""
    gguf_toy.write(tmp_path / "toy.gguf", zoo.make("qwen2_moe", dtype=torch.bfloat16), tokenizer=add_large_vocabulary)
    save_toy(tmp_path / "toy")
    path = tmp_path / "toy" / "tokenizer.json"
    written = json.loads(path.read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary |= {token: number for number, token in enumerate(FILLING, len(vocabulary))}
    path.write_text(json.dumps(written))
    (tmp_path / "text.txt").write_text("Once upon a time there was a model. " * 20)
    return tmp_path


def add_large_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = [*gguf_toy.TOKENS, *FILLING]
    unused = [gguf.TokenType.UNUSED] * len(FILLING)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(gguf_toy.TOKENS) + unused)
    writer.add_token_merges(["~ ~"])
    writer.add_eos_token_id(len(gguf_toy.ASCII))
    writer.add_chat_template(gguf_toy.TEMPLATE)


def commands_on(file: str, folder: str) -> list[list[str]]:
    """Every command that opens a model, on one or the other."""
    few = ["-p", "Hello", "--max-new-tokens", "2"]
    return [
        ["plan", file, *SMALL],
        ["chat", file, *SMALL, "--max-new-tokens", "2"],
        ["verify", file, *SMALL, "--tokens", "2"],
        ["record", file, *SMALL, *few, "-o", "toy.trace"],
        ["eval", file, *SMALL, "--text", "text.txt", "--alphas", "0"],
        ["pack", file, "--precision", "int8"],
        ["generate", file, *SMALL, *few, "--precision", "int8"],
        ["plan", folder, *SMALL],
        ["pack", folder],
        ["generate", folder, *SMALL, *few],
        ["generate", "demo", *few],
    ]


@contextmanager
def serving(model: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a server of `model`."""
    command = [sys.executable, "-m", "smoe", "serve", model, *SMALL, "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"serving \S+ at (http://\S+)", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def environment_of(folder: Path, **more: str) -> dict[str, str]:
    """This process's, in which nothing forbids to ask the hub."""
    usual = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    paths = os.pathsep.join(map(str, sys.path))
    return usual | {"PYTHONPATH": paths, "SMOE_DEBUG": "1", "XDG_CACHE_HOME": str(folder / "cache")} | more


def run_all(commands: list[list[str]], folder: Path, environment: dict[str, str]) -> None:
    program = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    ran = subprocess.run(program, cwd=folder, env=environment, input="hi", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_commands_ask_nothing(hub: tuple[str, list[str]], folder: Path) -> None:
    address, asked = hub
    run_all(commands_on("toy.gguf", "toy"), folder, environment_of(folder, HF_ENDPOINT=address))
    assert asked == []


def test_a_server_asks_nothing(hub: tuple[str, list[str]], folder: Path) -> None:
    address, asked = hub
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
    with serving("toy.gguf", folder, environment_of(folder, HF_ENDPOINT=address)) as server:
        request = urllib.request.Request(f"{server}/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] > 0
    assert asked == []


def test_large_vocabularies_load_offline(hub: tuple[str, list[str]], folder: Path) -> None:
    address, asked = hub
    few = ["-p", "Hello", "--max-new-tokens", "2"]
    commands = [["generate", name, *SMALL, *few] for name in ("toy.gguf", str(folder / "toy.gguf"), "toy")]
    run_all(commands, folder, environment_of(folder, HF_ENDPOINT=address, HF_HUB_OFFLINE="1"))
    assert asked == []
