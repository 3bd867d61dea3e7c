"""Commands that compute nothing load neither torch nor the library: a plan, a refusal, help, a look at a cluster.

One process runs all of them. Would catch an import of torch anywhere that `smoe plan` reaches: it takes seconds, and
hundreds of MiB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from smoe.cli import app
from tests import gguf_toy, zoo
from tests.rough_toys import new_folder, new_gguf

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "fastapi", "ray")
PROGRAM = """
import contextlib, io, json, sys
from smoe import cli
from smoe.machine import quick_look
from smoe.report import on_clock

on_clock._WARM_UP, on_clock._STEPS = 2, 4
rates = quick_look.QuickLook(memory=20e9, experts=4e9, products=1e11, disk=1e8)
quick_look._looked_apart = lambda expert_bytes: (rates, True)
for line in json.load(sys.stdin):
    sys.argv = ["smoe", *line]
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    loaded = [name for name in HEAVY if name in sys.modules]
    print(json.dumps([line, code, loaded, out.getvalue()[-2000:]]), flush=True)
"""
PLANS = [["plan", "demo"], ["plan", "demo", "--memory", "20MiB", "--json"], ["plan", "demo", "--preset", "hobbit"]]
REFUSED = [
    ["plan", "demo", "--memory", "1MiB"],
    ["plan", "demo", "--set", "nothing=1"],
    ["generate", "demo", "--memory", "1MiB", "-p", "x"],
    ["chat", "demo", "--memory", "1MiB"],
    ["serve", "demo", "--memory", "1MiB", "--port", "0"],
    ["generate", "demo", "--memory", "2xB", "-p", "x"],
    ["generate", "demo", "-p", ""],
    ["generate", "demo", "--preset", "nothing", "-p", "x"],
    ["generate", "demo", "--device", "nothing", "--memory", "20MiB", "-p", "x"],
    ["generate", "/nothing/here", "-p", "x"],
    ["cluster", "plan", "demo", "--worker-profile", "nothing"],
    ["cluster", "status"],
]


def helps() -> list[list[str]]:
    """`--help` of every command."""
    found, groups = [["--help"]], [([], typer.main.get_command(app))]
    while groups:
        words, group = groups.pop()
        for name, command in group.commands.items():  # type: ignore[attr-defined]
            found.append([*words, name, "--help"])
            if hasattr(command, "commands"):
                groups.append(([*words, name], command))
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[str], int, list[str], str]]:
    folder = tmp_path_factory.mktemp("light")
    bare = folder / "bare"
    bare.mkdir()
    zoo.make("qwen3_next").config.save_pretrained(bare)
    toys = [gguf_toy.write(folder / "toy.gguf", gguf_toy.make("qwen3_moe")), zoo.save("mixtral", folder / "toy"), bare]
    plans = [*PLANS, *(["plan", str(toy), "--memory", "64MiB"] for toy in toys)]
    plans += [["plan", str(new_folder(folder / "new"))], ["plan", str(new_gguf(folder / "new.gguf"))]]
    lines = [*helps(), *REFUSED, *plans]
    program = PROGRAM.replace("HEAVY", repr(HEAVY))
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[[")]


def test_nothing_heavy_is_loaded(ran: list[tuple[list[str], int, list[str], str]]) -> None:
    loaded = {" ".join(line): names for line, _, names, _ in ran}
    assert {line: names for line, names in loaded.items() if names} == {}
    assert len(ran) > 30, "every command, and what is planned and refused"


def test_they_do_what_they_are_for(ran: list[tuple[list[str], int, list[str], str]]) -> None:
    for line, code, _, output in ran:
        is_refused = line in REFUSED
        assert code == (2 if is_refused else 0), (line, output)
        assert not is_refused or "error" in output or "Error" in output, (line, output)
