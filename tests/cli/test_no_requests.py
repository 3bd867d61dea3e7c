"""Models that are on disk already: no command asks the hub about them, whatever the environment says.

Would catch a tokenizer of more than 100,000 tokens, which the library looks up by its name to find out whether it is
one of Mistral's; a bare file or folder name that is taken for a repository's; a file that does not load offline.
"""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import shutil
import socket
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
from huggingface_hub import constants

from tests import gguf_toy, zoo
from tests.cli.conftest import Run
from tests.toy import save_toy

SMALL = ("--memory", "64MiB", "--context", "96")
FILLING = [f"[PAD{number}]" for number in range(100_001)]
"""Tokens that no text has: the library's question depends on how many there are."""


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `toy.gguf` and the folder `toy` are, both with a large vocabulary, and a text."""
    tmp_path = tmp_path_factory.mktemp("models")
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


FEW = ("-p", "Hello", "--max-new-tokens", "2")
COMMANDS = (
    ("plan", "toy.gguf", *SMALL),
    ("generate", "toy.gguf", *SMALL, *FEW),
    ("chat", "toy.gguf", *SMALL, "--max-new-tokens", "2"),
    ("verify", "toy.gguf", *SMALL, "--tokens", "2"),
    ("record", "toy.gguf", *SMALL, *FEW, "-o", "toy.trace"),
    ("eval", "toy.gguf", *SMALL, "--text", "text.txt", "--alphas", "0"),
    ("pack", "toy.gguf", "--precision", "int8"),
    ("generate", "toy.gguf", *SMALL, *FEW, "--precision", "int8"),
    ("plan", "toy", *SMALL),
    ("pack", "toy"),
    ("generate", "toy", *SMALL, *FEW),
    ("generate", "demo", *FEW),
)
"""Every command that opens a model, on a file, a folder, and their packs."""


@pytest.mark.parametrize("forbids", [False, True], ids=["online", "offline"])
def test_commands_look_up_no_host(
    forbids: bool, run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Online by bare names, which may look like a repository's; offline by whole paths, which never do."""
    hosts: list[Any] = []

    def look_up(host: Any, *_: Any, **__: Any) -> Any:
        hosts.append(host)
        raise OSError("no host is reached from here")

    shutil.copytree(folder, tmp_path / "models")
    monkeypatch.chdir(tmp_path / "models")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", forbids)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name, model, *options in COMMANDS:
        command = [name, tmp_path / "models" / model if forbids and model != "demo" else model, *options]
        monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
        ran = run(*command)
        assert ran.code == 0, (command, ran.err)
        assert hosts == [], command


@contextmanager
def serving(model: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a server of `model`."""
    command = [sys.executable, "-m", "smoe", "serve", model, *SMALL, "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        printed = ""
        while not (found := re.search(r"serving \S+ at (http://\S+)", printed)):
            line = process.stderr.readline()
            assert line, printed
            printed += line
        yield found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def environment_of(folder: Path, **more: str) -> dict[str, str]:
    """This process's, in which nothing forbids to ask the hub."""
    usual = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    paths = os.pathsep.join(map(str, sys.path))
    return usual | {"PYTHONPATH": paths, "SMOE_DEBUG": "1"} | more


def test_a_server_asks_nothing(hub: tuple[str, list[str]], folder: Path) -> None:
    address, asked = hub
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
    with serving("toy.gguf", folder, environment_of(folder, HF_ENDPOINT=address)) as server:
        request = urllib.request.Request(f"{server}/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] > 0
    assert asked == []


def test_a_process_that_may_not_ask_reads_the_tokenizers(folder: Path) -> None:
    program = """if True:
        from pathlib import Path
        from smoe.models.checkpoint import checkpoint_at
        for name in ("toy.gguf", "toy"):
            for path in (Path(name), Path(name).absolute()):
                assert checkpoint_at(path).tokenizer()("Hello")["input_ids"]
    """
    environment = environment_of(folder, HF_HUB_OFFLINE="1")
    ran = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
