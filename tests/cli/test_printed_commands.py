"""The commands of README and of pages for users, run as they are printed, with a small model in place of each model.

Would catch: an option that was renamed and is still printed, an order of commands that does not work on first use, a
comment that a shell would not take for one.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import smoe
from smoe.cli import app
from tests import gguf_toy, zoo
from tests.cli.conftest import Run
from tests.forked import Forked
from tests.toy import save_toy

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/start.md",
    *(f"docs/{page}.md" for page in ("commands", "quality", "emulated", "exactness", "speed")),
)
MODELS = ("Qwen/Qwen3-30B-A3B", "./my-model")
"""A toy takes their places."""
MEASURED = ("smoe eval", "smoe tune")
"""Where a block has these, the toy takes the place of `demo`, too: measured on texts, `demo` takes a minute."""
OTHERS = ("make", "pip", "python3", "curl")
"""What makes an environment: `make wheel-test` does that. `curl` asks the server of the start page, in a test of its
own."""
LONG = (("bench",), ("simulate",), ("tune", "--prefetch"), ("launch",))
"""Minutes and more, whatever the model, or a program that may be missing: these are only parsed here, and run in tests
of their own."""
UNTIL_ENDED = {("serve",): "serving", ("cluster", "up"): "worker local-1: ready"}
"""What runs until Ctrl-C, and what it prints once it works."""


def blocks(kind: str) -> Iterator[Any]:
    """Of the pages, every block of this kind, under a name of its own."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf8")
        for number, found in enumerate(re.findall(rf"^```{kind}\n(.*?)^```", text, re.S | re.M)):
            yield pytest.param(found, id=f"{page}-{number}")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the name that the pages have for one."""
    model = zoo.make("qwen2_moe", dtype=torch.bfloat16, max_position_embeddings=4096)
    return gguf_toy.write(tmp_path_factory.mktemp("gguf") / "my-model.gguf", model)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the context that the pages ask for."""
    return save_toy(tmp_path_factory.mktemp("small") / "my-model", max_position_embeddings=4096)


@pytest.fixture
def folder(small: Path, gguf_file: Path, quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader would be: the model in it, and a text; what is measured on texts takes some tokens of them."""
    shutil.copytree(small, tmp_path / "my-model")
    shutil.copy(gguf_file, tmp_path)
    (tmp_path / "mine.txt").write_text("Once upon a time there was a cat who liked to dig. " * 12)
    for name, tokens in (("eval.TOKENS", 48), ("tune_shares._TOKENS", 110), ("tune._PRICED_TOKENS", 110)):
        monkeypatch.setattr(f"smoe.cli.{name}", tokens)
    monkeypatch.setattr("smoe.cli.eval.MOST_QUESTIONS", 2)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(block: str) -> Iterator[list[str]]:
    """Of a block's lines, the words after `smoe`, with models that are here."""
    large = (*MODELS, "demo") if any(measured in block for measured in MEASURED) else MODELS
    for printed in block.splitlines():
        assert printed.startswith("$ ")
        program, *words = shlex.split(printed.removeprefix("$ "), comments=True)
        if program not in OTHERS:
            assert program == "smoe", printed
            yield ["./my-model" if word in large else word for word in words]


def parse(words: Sequence[str], group: Any = None) -> None:
    """Raises what the command line would for options that it does not have."""
    group = group or typer.main.get_command(app)
    context = group.make_context("smoe", list(words), resilient_parsing=True)
    name, command, rest = group.resolve_command(context, list(words))
    if hasattr(command, "resolve_command"):
        parse(rest, command)
    else:
        command.make_context(name, rest)


@contextmanager
def started(words: Sequence[str], words_of_success: str) -> Iterator[str]:
    """A command that runs until Ctrl-C, which ends it here: what it has printed once it works."""
    environment = {**os.environ, "PYTHONPATH": str(Path(smoe.__file__).parents[1])}
    line = [sys.executable, "-m", "smoe", *words, *["--port", "0"] * (words[0] == "serve")]
    streams: dict[str, Any] = {"stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    with Forked(line, env=environment, **streams) as process:
        shown = ""
        while words_of_success not in shown:
            line_shown = process.stderr.readline()
            assert line_shown, shown
            shown += line_shown
        yield shown
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode in (0, 130), words


@pytest.mark.parametrize("block", blocks("console"))
def test_every_line_is_parsed(block: str, folder: Path) -> None:
    for words in commands(block):
        parse(words)


@pytest.mark.parametrize("block", blocks("console"))
def test_every_line_works(block: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in commands(block):
        if any(set(long) <= set(words) for long in LONG):
            continue
        endless = [success for names, success in UNTIL_ENDED.items() if tuple(words[: len(names)]) == names]
        if endless:
            with started(words, *endless):
                continue
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/bye\n"))
        ran = run(*words)
        assert ran.code == 0, (words, ran.err)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_server_of_the_start_page_is_asked_as_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a port of the test's own: the page, by curl, by README's curl, and by OpenAI's client."""
    page = (ROOT / PAGES[1]).read_text(encoding="utf8")
    (serve,) = re.findall(r"^\$ smoe (serve .*)$", page, re.M)
    (curl,) = re.findall(r"^\$ (curl .*)$", page, re.M)
    (program,) = re.findall(r"^```python\n(from openai .*?)^```", page, re.S | re.M)
    with started(shlex.split(serve), "serving") as shown:
        (address,) = re.findall(r"serving my-model at (http://\S+)/v1 ", shown)
        here = "http://127.0.0.1:8000"
        assert "<html" in asked([*shlex.split(curl)[:1], address])
        for line in (curl, *re.findall(r"^\$ (curl .*)$", (ROOT / PAGES[0]).read_text(encoding="utf8"), re.M)):
            answer = json.loads(asked(shlex.split(line.replace(here, address), comments=True)))
            assert answer["choices"][0]["message"]["content"]
        exec(compile(program.replace(here, address), "a block of the page", "exec"), {})
        assert capsys.readouterr().out


def asked(line: Sequence[str]) -> str:
    """What curl prints."""
    return subprocess.run([*line, "--silent", "--max-time", "60"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("block", (each for each in blocks("python") if "OpenAI(" not in each.values[0]))
def test_every_program_works(block: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model has a tokenizer of its own, and so stays itself."""
    for name in MODELS:
        block = block.replace(name, "./my-model")
    exec(compile(block, "a block of the page", "exec"), {})
    text, ratio = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert text and 0 <= float(ratio) <= 1


@pytest.mark.parametrize("words", [("simulate", "--paper", "smoe"), ("cluster", "up", "./my-model")], ids=" ".join)
def test_options_that_are_not_there_are_found(words: tuple[str, ...]) -> None:
    """Or whatever is printed would be right."""
    parse(words)
    with pytest.raises(Exception, match="No such option"):
        parse([*words, "--papers"])
